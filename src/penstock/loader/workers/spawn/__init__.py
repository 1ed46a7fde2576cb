"""Worker processes by the "spawn" method that begin as forks of a template, which has imported what they need."""
