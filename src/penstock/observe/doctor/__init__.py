"""The doctor: a loop or a loader is measured, part by part and trial by trial, and nothing of it is changed."""
