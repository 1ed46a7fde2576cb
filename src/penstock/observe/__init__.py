"""Figures about a run: live while it runs, as a record and reports afterwards, and the doctor that explains them."""
