"""What the server says of a round that failed, or that changed nothing."""

from __future__ import annotations

from collections.abc import Set

from atoll.aggregation.secure_sum import SecureSum
from atoll.components.base import Aggregation
from atoll.core.errors import warn
from atoll.core.text import few
from atoll.engines.record import Record
from atoll.engines.update_checks import BY_EARLIER


def too_few(record: Record, accepted: int, cohort: int, share: float, aggregation: Aggregation) -> str:
    """Say why a round failed, and what can be done about it."""
    clients = dict[str, list[str]]()
    for client, reason in {**record.refused, **record.lost}.items():
        clients.setdefault(reason, []).append(client)
    reasons = [f"client{'s' if len(own) > 1 else ''} {few(own)}: {reason}" for reason, own in clients.items()]
    by_share = accepted < share * cohort or not accepted
    if isinstance(aggregation, SecureSum) and (least := aggregation.least(cohort)) > share * cohort:
        required = f"options.secure_sum.threshold requires {least}"
    elif by_share:
        required = f"train.min_accepted requires {share:.0%}"
    else:
        required = f"{aggregation.name!r} requires {aggregation.least_updates}"
    beyond = sum(f"({BY_EARLIER})" in reason for reason in record.refused.values())
    remedies = {
        "lower train.lr if training diverges, or raise a bound that is too tight, or correct a component that "
        "does not send what it declares": record.refused,
        "suspect an update that an earlier round accepted and that spoiled the model, because most clients now "
        "move far more than before (start again without its client, with a lower train.first_norm, or with "
        'method.aggregation = "median")': beyond > cohort / 2,
        "resume when the lost clients are back": record.lost,
        "lower train.min_accepted to continue with fewer": accepted and by_share,
        f"start again with other options.{aggregation.name}, which require fewer": not by_share,
    }
    return (
        f"round {record.round} failed: {accepted} of {cohort} updates were usable and {required}; "
        f"{'; '.join(reasons[:3])}{' …' if len(reasons) > 3 else ''}; "
        f"{', or '.join(remedy for remedy, applies in remedies.items() if applies)}"
    )


def warn_of_still(trained: Set[str], changed: Set[str]) -> None:
    """Warn of a round after which all weights, or all of the encoder, are as before.

    Args:
        trained: Names of the weights that clients train and send.
        changed: Names of those that some client changed.
    """
    encoder = {name for name in trained if name.startswith("encoder.")}
    for names, words in ((trained, "that leaves them"), (encoder, "of the encoder")):
        if names and not names & changed:
            warn(
                f"clients trained, and no weight {words} changed; check that the loss depends on the weights and "
                "that nothing cuts it off, such as .item(), .detach() or torch.no_grad()"
            )
            return
