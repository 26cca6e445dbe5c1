"""What every benchmark stands on: clocks, counters, the machine, and the gate before a number."""
