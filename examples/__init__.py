"""Small scripts that use the planner; each runs without a GPU."""
