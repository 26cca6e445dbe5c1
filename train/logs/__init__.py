"""What a run tells: rows, tables, plots, alarms and costs."""
