"""What the process that trainers are forked from does once, so that no trainer does it again.

The fork server only imports modules, so importing this one does the work: it loads
numba's registries, which pull in scipy and take more time than a trainer needs for all else.
Nothing is executed that would start threads or touch a device, neither of which survives a fork.
"""

from numba.core.registry import cpu_target

import dtrain.runtime.worker  # noqa: F401

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
