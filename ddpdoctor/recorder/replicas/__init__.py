"""Writes down what each replica of a model is like."""
