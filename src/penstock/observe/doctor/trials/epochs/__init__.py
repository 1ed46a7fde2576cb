"""What a program does after its trials: its next epochs, and what it saves then."""
