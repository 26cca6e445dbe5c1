"""Output of a run: rows, tables, plots, alarms and costs."""
