"""From columns of a table to elements, as a part of the model that is saved with it."""
