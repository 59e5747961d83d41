"""The ClientApp, which ``flower-supernode`` runs at a site; an entry point, like the ``atoll`` command.

After an error at the site, the answer contains a sentence that the coordinator reports, and the round continues.
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
    """Parse the text of a complete recipe."""
    from atoll.recipe.recipe import read_recipe  # an entry point may import from the rooms above

    return read_recipe(text)


def answer(message: Message, context: Context, handle: Callable[[SiteSide, Tree], Tree]) -> Message:
    """Answer a request; after an error, the answer contains its sentence."""
    reply: Tree
    try:
        reply = handle(
            SiteSide(SiteOptions.read(context.node_config), read_recipe), codec.tree(message.content)
        )
        if "lost" in reply:
            log.error("%s", reply["lost"])
    except ValueError as error:  # includes UserError: the coordinator receives the sentence, too
        log.error("%s", error)
        reply = {"lost": str(error)}
    except Exception as error:
        log.error("%s", traceback.format_exc())
        reply = {"lost": f"{type(error).__name__}: {error}"}
    return Message(codec.records(reply), reply_to=message)


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Describe the site."""
    return answer(message, context, SiteSide.hello)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for one round."""
    return answer(message, context, SiteSide.train)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate on the site's local held-out images."""
    return answer(message, context, SiteSide.evaluate)
