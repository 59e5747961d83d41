"""The ClientApp, which ``flower-supernode`` runs at a site; an entry point, like the ``atoll`` command.

After an error at the site, the answer contains a sentence that the coordinator reports, and the round continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from atoll.core.files import private_files
from atoll.core.tree import Tree
from atoll.engines.flower import codec
from atoll.engines.flower.ledger import PRIVACY, UPDATE, record_answer, spent, updates_sent
from atoll.engines.flower.policy import PolicyError, WithdrawnError
from atoll.engines.flower.secure_site import answer_keys, answer_reveal, answer_shares
from atoll.engines.flower.site import SiteSide
from atoll.engines.flower.site_errors import IMAGES, SiteError, details_of, sentence_of
from atoll.engines.flower.site_options import SiteOptions

log = logging.getLogger("flwr")
OPTIONS = "at a site, data.path and data.source are data=… and source=… in --node-config"
app = ClientApp()


def answer(
    message: Message, context: Context, kind: str, handle: Callable[[SiteSide, Tree], Tree]
) -> Message:
    """Answer a request, and log it at the site; after an error, the answer contains its sentence."""
    reply: Tree
    at_site = True  # assumed until the configuration, which may be unreadable, says otherwise
    with private_files():
        try:
            side = SiteSide(SiteOptions.read(context.node_config))
            at_site = bool(side.options.site)
            request = request_of(message)
            reply = checked(handle, side, request)
            if kind == "hello" and "lost" in reply:
                reply["name"] = side.options.name  # so that the coordinator knows which site failed
            reply = logged(side, kind, request, reply)
        except (
            Exception
        ) as error:  # an error of the request, the configuration or the log: without a log, nothing leaves
            reply = refusal(error, at_site)
    return Message(codec.records(reply), reply_to=message)


def request_of(message: Message) -> Tree:
    """Read a request.

    Raises:
        SiteError: The message is not a request.
    """
    try:
        return codec.tree(message.content)
    except ValueError as error:  # its message quotes what the coordinator sent
        raise SiteError(
            f"the coordinator's request cannot be read: {error}; install the same version of Atoll on both sides"
        ) from None


def checked(handle: Callable[[SiteSide, Tree], Tree], side: SiteSide, request: Tree) -> Tree:
    """Answer a request; after an error, answer with the error's sentence."""
    try:
        reply = handle(side, request)
        if "lost" in reply:
            log.error("%s", reply["lost"])
    except Exception as error:
        return refusal(error, bool(side.options.site))
    return reply


def refusal(error: Exception, at_site: bool) -> Tree:
    """Log an error at the site, and return the answer that reports it to the coordinator."""
    sentence = sentence_of(error, at_site)
    log.error("%s%s", details_of(error), f" ({OPTIONS})" if sentence == IMAGES else "")
    return {"lost": sentence, **({"withdrawn": True} if isinstance(error, WithdrawnError) else {})}


def logged(side: SiteSide, kind: str, request: Tree, reply: Tree) -> Tree:
    """Write the answer into the site's audit log, and return it with the line's hash.

    Flower may process several requests at once, so only here is it known whether another update may leave.
    """
    log_of_site = side.options.audit_log
    if log_of_site is None:
        return reply
    reply = dict(reply)
    # As it was applied: the policy may have changed since.
    privacy = reply.pop(PRIVACY, {})
    with log_of_site.held():
        noise = {}
        if UPDATE in reply and (policy := side.options.read_policy()) is not None:
            try:
                policy.check_updates_sent(
                    updates_sent(log_of_site, reply["recipe"], request.get("federation"))
                )
                noise = spent(log_of_site, privacy)
            except PolicyError as error:
                reply = {"lost": str(error)}
        head = record_answer(log_of_site, kind, request, reply, noise)
    return {**reply, "log": head} if head else reply


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Describe the site."""
    return answer(message, context, "hello", SiteSide.hello)


@app.query("farewell")
def farewell(message: Message, context: Context) -> Message:
    """Learn that the coordinator will send no more requests."""
    return answer(message, context, "farewell", SiteSide.farewell)


@app.query("secure_keys")
def secure_keys(message: Message, context: Context) -> Message:
    """Secure aggregation: draw keys."""
    return answer(message, context, "secure_keys", lambda side, it: side.secure(answer_keys, it))


@app.query("secure_shares")
def secure_shares(message: Message, context: Context) -> Message:
    """Secure aggregation: share secrets."""
    return answer(message, context, "secure_shares", lambda side, it: side.secure(answer_shares, it))


@app.query("secure_reveal")
def secure_reveal(message: Message, context: Context) -> Message:
    """Secure aggregation: open the masks of a sum."""
    return answer(message, context, "secure_reveal", lambda side, it: side.secure(answer_reveal, it))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for one round."""
    return answer(message, context, "train", SiteSide.train)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate on the site's local held-out images."""
    return answer(message, context, "evaluate", SiteSide.evaluate)
