"""What a dataset keeps: data that its samples change, and caches whose keys find nothing."""
