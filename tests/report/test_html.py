import json

import pytest

from atoll.report.html import Html, json_for_script, table, tag

HOSTILE = "</script><!--<script>&amp;\u2028'\""


def test_what_a_script_reads_can_neither_end_nor_open_an_element():
    written = json_for_script({"name": HOSTILE})
    assert not set("<>&") & set(written)
    assert json.loads(written) == {"name": HOSTILE}


def test_a_number_that_is_none_never_reaches_the_page():
    with pytest.raises(ValueError, match="JSON"):
        json_for_script([float("nan")])


def test_text_and_attributes_are_escaped_and_html_is_not():
    assert tag("b", "<i>", Html("<i>")) == "<b>&lt;i&gt;<i></b>"
    assert tag("b", title='"><i>') == '<b title="&quot;&gt;&lt;i&gt;"></b>'


def test_rows_and_columns_have_headings():
    written = table("things", ["name", "size"], [["a", "1"]])
    assert written.count('scope="col"') == 2
    assert written.count('scope="row"') == 1
    assert "<td>1</td>" in written
