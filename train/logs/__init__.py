"""What a run prints and writes: rows, tables, plots, alarms and costs."""
