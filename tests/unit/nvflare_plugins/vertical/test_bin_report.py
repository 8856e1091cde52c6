"""The report's section on bins: it reads back, draws, and says what was released."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree

import pytest

from nvflare_plugins.kinds.vertical.guards import MEASURED, Exposure, bins_section
from nvflare_plugins.pages.charts import Line, line_chart
from nvflare_plugins.pages.run_record import RunRecord

FOUND = Exposure(56, 40, 20.635, 40, 0.0272, 0.0028, 0.02, 48, 5, 33, 12.51, 100)


def test_the_section_says_what_was_released_beside_the_caps():
    section = bins_section(FOUND, "guarded")
    cells = {row[0]: row[1:] for row in section.rows}
    assert cells["sums that a row is in, most"] == ("40", "40")
    assert cells["sums that a row is in, mean"] == ("20.6", "")
    assert cells["equations per row, mean over the rows of a node"] == ("0.003", "0.02")
    assert cells["nodes withheld by this job"] == ("5", "")
    assert cells["splits that divided a row, most"] == ("33", "100")
    assert cells["splits that divided a row, mean"] == ("12.5", "")
    uncapped = dataclasses.replace(FOUND, per_row_cap=None, share_cap=None, split_bits_cap=None)
    exact = bins_section(uncapped, "exact")
    assert [row[2] for row in exact.rows if row[2]] == ["none"] * 3 and "Preset exact" in exact.paragraphs[0]
    run = RunRecord("job", "a", "s", ("s",), "paillier", sections=(section,))
    assert RunRecord.from_dict(json.loads(json.dumps(run.to_dict()))) == run


@pytest.mark.parametrize("so_far", [0.0, 20.6, 5000.0])
def test_the_figure_draws_wherever_the_data_set_lies(so_far):
    section = bins_section(dataclasses.replace(FOUND, per_row_mean=so_far), "guarded")
    lines = [Line(curve.name, i + 1, curve.points) for i, curve in enumerate(section.curves)]
    root = ElementTree.fromstring(line_chart(lines, section.x_label, section.y_label))
    assert len([e for e in root if e.tag == "polyline"]) == len(MEASURED) + 1


def test_more_sums_recover_more_bins():
    assert len(MEASURED) == 3
    for points in MEASURED.values():
        sums, recovered = zip(*points, strict=True)
        assert sorted(sums) == list(sums) and sorted(recovered) == list(recovered)
        assert 0 < recovered[0] < recovered[-1] <= 1
