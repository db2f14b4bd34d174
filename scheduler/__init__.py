"""Pure decisions: which worker runs which stage of which microbatch, in what order, and why.

Nothing here reads a clock, a random number, a socket or a file, and nothing imports torch.
"""

from dtrain.scheduler.costs import Cluster, StepCosts
from dtrain.scheduler.order import Policy, order_actions
from dtrain.scheduler.plan import Action, Layout, Orders, Plan
from dtrain.scheduler.planner import even_cuts, make_plan, replan

__all__ = [
    "Action",
    "Cluster",
    "Layout",
    "Orders",
    "Plan",
    "Policy",
    "StepCosts",
    "even_cuts",
    "make_plan",
    "order_actions",
    "replan",
]
