"""The words that every other part of penstock uses; imports nothing else from penstock."""
