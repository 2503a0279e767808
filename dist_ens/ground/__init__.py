"""What every room stands on: errors, numbers and records. No configs and no numerics."""
