"""From the user's model file to a Graph: the only compiler package that imports torch."""
