"""The demo checkpoint, the synthetic pictures it was trained on, and the program that trains it."""
