"""What is done to a template's syntax tree: meters are put in, and a tag that means nothing here is taken out."""

from __future__ import annotations

from typing import Any, cast

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer


class Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what to train on; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 # Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Keep the body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PutMeters(NodeTransformer):
    """Puts calls of the environment's meters into a syntax tree.

    Attributes:
        call_weight: Nodes of the largest macro or recursive loop: what a call may cost.
    """

    def __init__(self) -> None:
        self.call_weight = 1

    def generic_visit(self, node: nodes.Node, *_: Any, **__: Any) -> nodes.Node:
        """The node that takes the place of this one, whose children have been replaced already."""
        super().generic_visit(node)
        if isinstance(node, nodes.For):
            weight = _nodes_in(node)
            if node.recursive:
                self.call_weight = max(self.call_weight, weight)
            node.iter = _call("metered", node, cast(nodes.Expr, node.iter), nodes.Const(weight, lineno=node.lineno))
        elif isinstance(node, nodes.Macro | nodes.CallBlock | nodes.Block):
            self.call_weight = max(self.call_weight, _nodes_in(node))
        elif isinstance(node, nodes.Concat):
            return _call("joined", node, *node.nodes)
        elif isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return _call("measured", node, node)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            bounds = (node.arg.start, node.arg.stop, node.arg.step)
            missing = nodes.Const(None, lineno=node.lineno)
            return _call("sliced", node, node.node, *(bound or missing for bound in bounds))
        return node


def _call(name: str, at: nodes.Node, *arguments: nodes.Expr) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=at.lineno)
    return nodes.Call(function, list(arguments), [], None, None, lineno=at.lineno)


def _nodes_in(node: nodes.Node) -> int:
    return 1 + sum(map(_nodes_in, node.iter_child_nodes()))
