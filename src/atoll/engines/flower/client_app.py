"""The ClientApp: what ``flower-supernode`` runs at a site. An entry point, like the ``atoll`` command.

A mistake at the site is answered with a sentence, so that the coordinator can name it and the round goes on.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from atoll.core.tree import Tree
from atoll.engines.flower import codec as codec
from atoll.engines.flower.site import SiteOptions, SiteSide
from atoll.recipe.recipe import Recipe

log = logging.getLogger("flwr")
app = ClientApp()


def read_recipe(text: str) -> Recipe:
    """The recipe in a complete recipe's text."""
    from atoll.recipe.recipe import read_recipe  # an entry point may look at the floors above

    return read_recipe(text)


def answer(message: Message, context: Context, handle: Callable[[SiteSide, Tree], Tree]) -> Message:
    """A request's answer, or why there is none."""
    reply: Tree
    try:
        reply = handle(
            SiteSide(SiteOptions.read(context.node_config), read_recipe), codec.tree(message.content)
        )
        if "lost" in reply:
            log.error("%s", reply["lost"])
    except ValueError as error:  # UserError among them: the sentence is for the coordinator, too
        log.error("%s", error)
        reply = {"lost": str(error)}
    except Exception as error:
        log.error("%s", traceback.format_exc())
        reply = {"lost": f"{type(error).__name__}: {error}"}
    return Message(codec.records(reply), reply_to=message)


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Who this is."""
    return answer(message, context, SiteSide.hello)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round."""
    return answer(message, context, SiteSide.train)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Numbers on the site's own held-out images."""
    return answer(message, context, SiteSide.evaluate)
