import json
import pickle

import tomli_w

from atoll.core.given import Given


def test_an_object_of_a_local_class_travels_by_cloudpickle_and_its_text_alone_is_written():
    class Local:
        word = "here"

    given = Given.named("test.<locals>.Local", "ab12", Local)
    assert given == "object:test.locals.Local#ab12"
    again = pickle.loads(pickle.dumps({"encoder": given}))["encoder"]
    assert again == given
    assert again.value().word == "here"
    assert json.loads(json.dumps(given)) == str(given)
    assert "here" not in tomli_w.dumps({"encoder": given})
