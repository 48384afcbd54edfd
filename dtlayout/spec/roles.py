"""Roles of weights: what a weight is to its model, by which optimizers share it and decide what decays."""

from typing import Literal, get_args

Role = Literal["matrix", "embedding", "head", "vector", "expert", "adapter"]
"""A matmul's weight in a block; the table of token vectors; the weight that makes logits; a norm's weight or a bias; a
stack of experts' matrices; a small matrix that is trained beside a frozen one."""

ROLES: tuple[Role, ...] = get_args(Role)
"""Every role, in the order in which messages list them."""
