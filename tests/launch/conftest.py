"""The scripts of many styles are run, not collected."""

collect_ignore = ["styles"]
