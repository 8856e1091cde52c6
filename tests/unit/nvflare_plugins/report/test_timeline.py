"""The strips of a report that say which stage of a round ran when."""

from __future__ import annotations

import re

from nvflare_plugins.pages.charts import timeline
from nvflare_plugins.pages.run_record import RoundRow, RunRecord

SPANS = (("encrypt", 0.0, 1.0), ("prepare", 0.5, 3.0), ("unknown", 0.0, 4.0), ("decrypt", 3.0, 4.0))


def html(*rows: RoundRow) -> str:
    return "".join(timeline(rows))


def test_stages_stand_where_they_ran():
    drawn = html(RoundRow(0, 4.0, spans=SPANS))
    titles = re.findall(r"<title>(.*?)</title>", drawn)
    assert titles == ["encryption: 0 to 1 s", "decryption: 3 to 4 s", "made ahead: 0.5 to 3 s"]
    left, width = zip(*re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', drawn), strict=True)
    assert float(left[0]) < float(left[2]) < float(left[1])
    assert float(width[0]) == float(width[1]) and abs(float(width[2]) - 2.5 * float(width[0])) < 0.2


def test_of_many_rounds_some_are_shown_the_first_and_the_last_among_them():
    drawn = html(*(RoundRow(i, 4.0, spans=SPANS) for i in range(100)))
    shown = [int(n) for n in re.findall(r">round (\d+)<", drawn)]
    assert len(shown) == 12 and shown[0] == 1 and shown[-1] == 100 and shown == sorted(set(shown))
    assert "12 of 100 rounds" in drawn


def test_rounds_without_spans_draw_nothing():
    assert html() == html(RoundRow(0, 1.0)) == html(RoundRow(0, 1.0, spans=(("unknown", 0.0, 1.0),))) == ""


def test_spans_are_kept_in_the_record(tmp_path):
    record = RunRecord("job", "a", "s", ("s",), "elgamal", rounds=(RoundRow(0, 4.0, spans=SPANS), RoundRow(1, 1.0)))
    record.write(tmp_path)
    assert RunRecord.read(tmp_path) == record
