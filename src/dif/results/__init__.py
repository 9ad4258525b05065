"""What estimators answer: scores and changes, their selection, comparison, text and files."""
