"""The laws of a fold, and checks that test any model against them."""
