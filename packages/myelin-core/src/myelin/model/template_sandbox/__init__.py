"""A Jinja sandbox whose templates can neither run long nor use much memory.

A chat template comes with the model file, from whoever made it. Jinja's own sandbox keeps it from reaching Python's
internals, but not from nested loops over ``range(100000)``, nor from ``'a' * 10**10``. A child process with limits
would cost more than all other work on a prompt, so a template is metered where it runs:

- every loop iteration, call, filter, operator and printed value costs *steps*, as many as there are nodes in what it
  may run before the next charge; a rendering has so many steps, and a deadline that is looked at whenever some are
  spent;
- every text that is made costs its length from a budget, and none may be longer than a limit. Whatever could make a
  huge value in one go (``*``, ``**``, ``%``, ``replace``, ``join``, ``center``, ``format``, …) runs only after its
  result's size is known to fit;
- lists and dictionaries are weighed as they are made, with what they hold counted as often as it is held: a list that
  holds a list twice, which holds a list twice, … must not grow a text of 2^40 elements;
- only known methods, functions and filters can be called.

How much there is follows from the input: long conversations get more. So the worst that a template can do is to take
:data:`SECONDS`, and memory in proportion to its steps and texts.
"""

from __future__ import annotations

from myelin.model.template_sandbox.charges import weigh
from myelin.model.template_sandbox.environment import MeteredEnvironment, render
from myelin.model.template_sandbox.meter import SECONDS, LimitExceededError, Meter, RaisedError

__all__ = ["SECONDS", "LimitExceededError", "Meter", "MeteredEnvironment", "RaisedError", "render", "weigh"]
