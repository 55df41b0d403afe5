"""A user's loss and weight per token: called on every micro-batch, their results checked, their failures raised by all
ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ....algos.losses import TokenLoss
from ....algos.objective import LossTokens, TokenFunctions
from ....algos.ratios import TokenWeights
from ....core.config import AlgoConfig
from ....core.errors import ConfigError, UserCodeError
from ...user_code.functions import LOSS_FN, WEIGHT_FN, UserFunction, load_function, source_digest, what_was_raised
from .accounting import MetricSums
from .world import World

REMEDY = "mend the function; docs/algorithms.md says what it gets and returns"


Loaded = Mapping[str, UserFunction]
"""Key of the run file -> function, of those that it names."""


def load_functions(algo: AlgoConfig) -> Loaded:
    """Those that ranks call. Raises ConfigError or UserCodeError."""
    named = ((algo.loss_fn, LOSS_FN), (algo.weight_fn, WEIGHT_FN))
    return {expected.key: load_function(name, expected) for name, expected in named if name}


def agree_on_source(world: World, functions: Loaded) -> None:
    """Raise ConfigError on every rank unless all have the same text of each function. Collective if there is one."""
    for key, function in functions.items():
        digests = world.exchange(source_digest(function.fn))
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise world.agreed(
                ConfigError(
                    f'{key} = "{function.name}": rank {others[0]} has another text of it than rank 0',
                    remedy="install the same version of the module everywhere, or name a file, which goes with the run",
                )
            )


def called(functions: Loaded) -> TokenFunctions:
    """The functions as `policy_objective` calls them. They raise UserCodeError, naming the function, for what it raises
    and for what cannot be trained on."""
    loss, weight = functions.get(LOSS_FN.key), functions.get(WEIGHT_FN.key)
    return TokenFunctions(
        loss=None if loss is None else lambda tokens: _loss(f'{LOSS_FN.key} = "{loss.name}"', loss, tokens),
        weight=None if weight is None else lambda tokens: _weight(f'{WEIGHT_FN.key} = "{weight.name}"', weight, tokens),
    )


def _loss(named: str, function: UserFunction, tokens: LossTokens) -> TokenLoss:
    live_T = tokens.live_T
    nowhere_T = torch.zeros_like(live_T, dtype=torch.bool)
    if not live_T.numel():  # an empty micro-batch that only pads the count
        return TokenLoss(live_T * 0, nowhere_T, nowhere_T)
    loss, metrics = _pair(_returned(named, function, tokens), dict[str, Tensor]())
    loss_T = _row(named, "its loss", loss, tokens)
    if live_T.requires_grad and not loss_T.requires_grad:
        raise UserCodeError(
            f"{named} returned a loss without gradient", remedy="compute it from tokens.live_T, not detached"
        )
    if not isinstance(metrics, Mapping):
        raise UserCodeError(f"{named} returned metrics of type {type(metrics).__name__}", remedy=REMEDY)
    rows = {
        " ".join(str(key).split()): _row(named, f'its metric "{key}"', row, tokens, is_flag=True).detach()
        for key, row in cast("Mapping[object, object]", metrics).items()
    }
    return TokenLoss(loss_T, nowhere_T, nowhere_T, rows)


def _weight(named: str, function: UserFunction, tokens: LossTokens) -> TokenWeights:
    everywhere_T = torch.ones_like(tokens.live_T, dtype=torch.bool)
    if not tokens.live_T.numel():
        return TokenWeights(tokens.live_T.detach(), everywhere_T, ~everywhere_T)
    weight, keep = _pair(_returned(named, function, tokens), everywhere_T)
    keep_T = _row(named, "what it keeps", keep, tokens, is_flag=True).bool()
    return TokenWeights(_row(named, "its weight", weight, tokens).detach(), keep_T, ~keep_T)


def _returned(named: str, function: UserFunction, tokens: LossTokens) -> Any:
    try:
        return function.fn(tokens)
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{named} raised {what_was_raised(error)}", remedy=REMEDY) from error


def _pair(returned: Any, otherwise: object) -> tuple[Any, Any]:
    values = cast("tuple[Any, ...]", returned) if isinstance(returned, tuple) else ()
    return (values[0], values[1]) if len(values) == 2 else (cast(Any, returned), otherwise)


def _is_finite(tokens: LossTokens) -> bool:
    given = (tokens.live_T, tokens.old_T, tokens.behaviour_T, tokens.advantages_T, tokens.reference_T, tokens.entropy_T)
    return all(bool(torch.isfinite(row_T.detach()).all()) for row_T in given if row_T is not None)


def _row(named: str, what: str, value: object, tokens: LossTokens, *, is_flag: bool = False) -> Tensor:
    """A value that must be one float for each token (`is_flag`: or a whole number, or a truth). One that is not finite
    is the function's doing only if what it was given was finite; else the step says from which groups it came."""
    live_T = tokens.live_T
    if not isinstance(value, Tensor):
        raise UserCodeError(f"{named}: {what} is of type {type(value).__name__}, not a tensor", remedy=REMEDY)
    if value.shape != live_T.shape:
        raise UserCodeError(
            f"{named}: {what} has shape {list(value.shape)} for {live_T.numel()} tokens",
            remedy="return one value for each token; means and masks come afterwards",
        )
    is_number = value.is_floating_point() or (is_flag and not value.is_complex())
    if not is_number or value.device != live_T.device:
        raise UserCodeError(
            f"{named}: {what} is {value.dtype} on {value.device}, the log-probs are {live_T.dtype} on {live_T.device}",
            remedy="return floats on the device of tokens.live_T",
        )
    bad = torch.nonzero(~torch.isfinite(value.detach()))
    if bad.numel() and _is_finite(tokens):
        at = int(bad[0])
        raise UserCodeError(
            f"{named}: {what} is {float(value.detach()[at])} at token {at} of {live_T.numel()}",
            remedy="return finite numbers: bound what goes into exp, log and divisions",
        )
    return value


def failure_of_all(world: World, failure: UserCodeError | None, place: str) -> UserCodeError:
    """What every rank raises once one of them has `failure`: the words of the lowest rank. Collective."""
    said = world.exchange("" if failure is None else failure.message)
    rank = next(rank for rank, text in enumerate(said) if text)
    return UserCodeError(f"{place}, rank {rank}: {said[rank]}", remedy=REMEDY)


def name_metrics_alike(world: World, tally: MetricSums, functions: TokenFunctions) -> None:
    """Every rank names the metrics that any rank's loss gave, so that they can be added up. Collective if there is a
    loss of the user's."""
    if functions.loss is None:
        return
    own = "\n".join(sorted(name for name in tally.names if name.startswith("mean/user/")))
    for name in {name for text in world.exchange(own) for name in text.splitlines()}:
        tally.add(name, 0.0)
