"""The recipes: one module per table or figure, each with a RECIPE."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from experiments.recipe import Recipe


def all_recipes() -> dict[str, Recipe]:
    """Return all recipes by name, in the order of their numbers."""
    modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
    recipes = [module.RECIPE for module in modules if hasattr(module, "RECIPE")]
    return {recipe.name: recipe for recipe in sorted(recipes, key=lambda recipe: recipe.number)}
