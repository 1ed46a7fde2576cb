"""What the doctor measures of streams, datasets that are iterated."""
