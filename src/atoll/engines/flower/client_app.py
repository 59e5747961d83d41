"""The ClientApp, which ``flower-supernode`` runs at a site; an entry point, like the ``atoll`` command.

After an error at the site, the answer contains a sentence that the coordinator reports, and the round continues.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from atoll.core.errors import RunError
from atoll.core.files import private_files
from atoll.core.tree import Tree
from atoll.engines.flower import codec as codec
from atoll.engines.flower.ledger import UPDATE, record_answer, updates_sent
from atoll.engines.flower.policy import PolicyError, WithdrawnError
from atoll.engines.flower.secure_site import answer_keys, answer_reveal, answer_shares
from atoll.engines.flower.site import SiteSide
from atoll.engines.flower.site_options import SiteOptions
from atoll.recipe.recipe import Recipe

log = logging.getLogger("flwr")
app = ClientApp()


def read_recipe(text: str) -> Recipe:
    """Parse the text of a complete recipe."""
    from atoll.recipe.recipe import read_recipe  # an entry point may import from the layers above

    return read_recipe(text)


def answer(
    message: Message, context: Context, kind: str, handle: Callable[[SiteSide, Tree], Tree]
) -> Message:
    """Answer a request, and log it at the site; after an error, the answer contains its sentence."""
    reply: Tree
    with private_files():
        try:
            side = SiteSide(SiteOptions.read(context.node_config), read_recipe)
            request = codec.tree(message.content)
            reply = checked(handle, side, request)
            reply = logged(side, kind, request, reply)
        except (
            ValueError
        ) as error:  # of the request, the configuration or the log, without which nothing leaves
            log.error("%s", error)
            reply = {"lost": str(error)}
    return Message(codec.records(reply), reply_to=message)


def checked(handle: Callable[[SiteSide, Tree], Tree], side: SiteSide, request: Tree) -> Tree:
    """Answer a request; after an error, with its sentence."""
    try:
        reply = handle(side, request)
        if "lost" in reply:
            log.error("%s", reply["lost"])
    except (ValueError, RunError) as error:  # includes UserError: the coordinator receives the sentence, too
        log.error("%s", error)
        return {"lost": str(error), **({"withdrawn": True} if isinstance(error, WithdrawnError) else {})}
    except Exception as error:
        log.error("%s", traceback.format_exc())
        return {"lost": f"{type(error).__name__}: {error}"}
    return reply


def logged(side: SiteSide, kind: str, request: Tree, reply: Tree) -> Tree:
    """Write the answer into the site's audit log, and return it with the line's hash.

    Flower may run several requests at once, so whether another update may leave is known only here.
    """
    log_of_site = side.options.audit_log
    if log_of_site is None:
        return reply
    with log_of_site.held():
        if UPDATE in reply and (policy := side.options.read_policy()) is not None:
            try:
                policy.check_updates_sent(updates_sent(log_of_site, reply["recipe"]))
            except PolicyError as error:
                reply = {"lost": str(error)}
        head = record_answer(log_of_site, kind, request, reply)
    return {**reply, "log": head} if head else reply


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Describe the site."""
    return answer(message, context, "hello", SiteSide.hello)


@app.query("farewell")
def farewell(message: Message, context: Context) -> Message:
    """Learn that the site is asked no more."""
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
