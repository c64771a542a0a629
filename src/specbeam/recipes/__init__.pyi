"""The public names of this package, each once: `specbeam.core.lazy` reads this list when the package runs."""

from specbeam.recipes.best import best_first as best_first
from specbeam.recipes.catalogue import HEAD_RECIPES as HEAD_RECIPES
from specbeam.recipes.catalogue import RECIPES as RECIPES
from specbeam.recipes.catalogue import resolve as resolve
from specbeam.recipes.heads import paper_of as paper_of
from specbeam.recipes.method import recipe_of as recipe_of
from specbeam.recipes.method import require_at_least_one as require_at_least_one
from specbeam.recipes.tuning.acceptance import with_guess as with_guess
from specbeam.recipes.tuning.costs import NODES as NODES
from specbeam.recipes.tuning.costs import curve_of as curve_of
from specbeam.recipes.tuning.costs import rest_curve as rest_curve
from specbeam.recipes.tuning.idle_runs import IdleRuns as IdleRuns
from specbeam.recipes.tuning.stored_prompt import StoredPrompt as StoredPrompt
from specbeam.recipes.tuning.stored_prompt import TurnCost as TurnCost
from specbeam.recipes.tuning.stored_prompt import seconds_of as seconds_of
