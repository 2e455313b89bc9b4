"""A .dockerignore by Docker's rules: against moby's own table, and Docker's Python SDK as an oracle."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from docker.utils.build import PatternMatcher

from launcher.inputs.ignore_rules import DockerIgnore, parse_rule

# Pattern, path, whether Docker excludes it: github.com/moby/patternmatcher, patternmatcher_test.go (Apache-2.0).
MOBY = r"""
** file yes
**/ file yes
** dir/file yes
**/ dir/file yes
**/** dir/file yes
dir/** dir/file yes
dir/** dir/dir2/file yes
**/dir dir yes
**/dir dir/file yes
**/dir2/* dir/dir2/file yes
**/dir2/** dir/dir2/dir3/file yes
**file file yes
**file dir/file yes
**/file dir/file yes
**file dir/dir/file yes
**/file dir/dir/file yes
**/file* dir/dir/file yes
**/file* dir/dir/file.txt yes
**/file*txt dir/dir/file.txt yes
**/file*.txt dir/dir/file.txt yes
**/file*.txt* dir/dir/file.txt yes
**/**/*.txt dir/dir/file.txt yes
**/**/*.txt2 dir/dir/file.txt no
**/*.txt file.txt yes
**/**/*.txt file.txt yes
a**/*.txt a/file.txt yes
a**/*.txt a/dir/file.txt yes
a**/*.txt a/dir/dir/file.txt yes
a/*.txt a/dir/file.txt no
a/*.txt a/file.txt yes
a/*.txt** a/file.txt yes
a[b-d]e ae no
a[b-d]e ace yes
a[b-d]e aae no
a[^b-d]e aze yes
.* .foo yes
.* foo no
abc.def abcdef no
abc.def abc.def yes
abc.def abcZdef no
abc?def abcZdef yes
abc?def abcdef no
a\\ a\ yes
a\*b a*b yes
**/foo/bar foo/bar yes
**/foo/bar dir/foo/bar yes
**/foo/bar dir/dir2/foo/bar yes
abc/** abc no
abc/** abc/def yes
abc/** abc/def/ghi yes
**/.foo .foo yes
**/.foo bar.foo no
a(b)c/def a(b)c/def yes
a(b)c/def a(b)c/xyz no
a.|)$(}+{bc a.|)$(}+{bc yes
dist/*.whl dist/proxy.py-2.4.0rc3.dev36+g08acad9-py3-none-any.whl yes
* abc yes
*c abc yes
a* ab/c yes
a*/b abc/b yes
a*/b a/c/b no
a*b*c*d*e*/f axbxcxdxexxx/f yes
a*b*c*d*e*/f axbxcxdxe/xxx/f no
a*b?c*x abxbbxdbxebxczzx yes
a*b?c*x abxbbxdbxebxczzy no
ab[^c] abc no
ab[^e-g] abc yes
a\*b ab no
a?b a☺b yes
a[^a]b a☺b yes
a???b a☺b no
[a-ζ]* α yes
*[a-ζ] A no
a?b a/b no
a*b a/b no
[\]a] ] yes
[\-] - yes
[x\-] x yes
[x\-] - yes
[x\-] z no
[\-x] x yes
[\-x] - yes
[\-x] a no
*x xxx yes
"""
SEVERAL = [
    (["docs", "!docs/README.md"], "docs/README.md", False),
    (["docs/", "!docs/README.md"], "docs/README.md", False),
    (["docs/*", "!docs/README.md"], "docs/README.md", False),
    (["!fileutils.go", "*.go"], "fileutils.go", True),
    (["*.go", "!fileutils.go"], "fileutils.go", False),
    (["**", "!util/docker/web"], "util/docker/web/foo", False),
    (["**", "!util/docker/web", "util/docker/web/foo"], "util/docker/web/foo", True),
    (["**", "!dist/*.whl"], "dist/a-1.dev36+g08-py3-none-any.whl", False),
]
REFUSED = ["!", "[]a]", "[-]", "[x-]", "[-x]", "\\", "[a-b-c]", "[", "[^", "[^bc", "a[", "[^]", "[z-a]", "!  "]


def excludes(lines: list[str], path: str) -> bool:
    return DockerIgnore(found for line in lines if (found := parse_rule(line))).excludes(path)


def test_mobys_table() -> None:
    rows = [row.split(" ") for row in MOBY.split("\n")[1:-1]]
    assert len(rows) == 84
    assert not [row for row in rows if excludes([row[0]], row[1]) is not (row[2] == "yes")]


@pytest.mark.parametrize(("lines", "path", "said"), SEVERAL)
def test_the_last_rule_that_matches_decides(lines: list[str], path: str, said: bool) -> None:
    assert excludes(lines, path) is said


@pytest.mark.parametrize("line", REFUSED)
def test_patterns_that_docker_refuses(line: str) -> None:
    with pytest.raises((ValueError, re.error)):
        parse_rule(line)


def test_lines_are_read_as_docker_reads_them() -> None:
    """A pattern is anchored at the top, with or without slashes around it; only a # at the very start is a comment."""
    for line in ("data", "/data", "data/", " data ", "./data", "x/../data", "//data"):
        assert excludes([line], "data/a")
        assert excludes([line], "data")
        assert not excludes([line], "pkg/data/a")
    assert parse_rule("# data") is parse_rule("") is parse_rule("  ") is None
    assert excludes([" #x"], "#x")
    assert excludes(["data", "! data/a"], "data/b")
    assert not excludes(["data", "! data/a"], "data/a")
    assert not excludes(["."], "a")
    assert not excludes(["/"], "a")
    assert excludes(["a[[]b"], "a[b")


def test_what_the_sdk_says() -> None:
    """Random patterns, but for ** and [^a]: there the SDK differs from Docker itself (moby's table has them)."""
    chance, differing = random.Random(15), []
    paths = ["/".join(parts) for n in (1, 2, 3) for parts in itertools.product(["a", "b", "ab", "a.py"], repeat=n)]
    for _ in range(400):
        parts = ["a", "b", "ab", "a*", "*", "?", "*.py", "[ab]", "a.py"]
        patterns = [
            chance.choice(["", "", "!", "/"]) + "/".join(chance.choices(parts, k=chance.choice([1, 1, 2, 3])))
            for _ in range(chance.randint(1, 4))
        ]
        sdk, ours = (
            PatternMatcher(list(patterns)),
            DockerIgnore(found for one in patterns if (found := parse_rule(one))),
        )
        differing += [(patterns, path) for path in paths if sdk.matches(path) != ours.excludes(path)]
    assert not differing[:5]
