"""Pure decisions: which worker runs which stage of which microbatch, in what order, and why.

Nothing here reads a clock, a random number, a socket or a file, and nothing imports torch.
"""

from dtrain.scheduler.order import order_actions
from dtrain.scheduler.plan import Action, Layout, Plan
from dtrain.scheduler.planner import even_cuts, make_plan, replan

__all__ = ["Action", "Layout", "Plan", "even_cuts", "make_plan", "order_actions", "replan"]
