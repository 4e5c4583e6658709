"""Golden: numbers of every stage's current version, kept, so that a change of them does not go unnoticed."""
