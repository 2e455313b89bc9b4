"""`launch prices`: the price list of the Cloud Billing Catalog, the user's cache, and which prices plans use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher import catalog
from launcher.catalog import Catalog, PriceTable, Service, tables
from launcher.errors import LaunchError
from launcher.inputs import price_table
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Status, Truncated
from launcher.testing.googlecloud.project import billing as real
from launcher.testing.googlecloud.project.billing import AMERICAS, sku
from tests.command import ROOT, Ran, launch

SHIPPED = catalog.load()
SKUS = "cloudbilling.services.skus.list"
TODAY = "2026-11-23"
DAY = 86400.0


class Home:
    """A user with an empty cache and a price list that Google serves."""

    def __init__(self, folder: Path, cloud: GoogleCloud) -> None:
        self.folder, self.cloud = folder, cloud
        self.env = {**cloud.environ(), "HOME": str(folder), "XDG_CACHE_HOME": "", "LAUNCH_OFFLINE": ""}
        cloud.billing.rows, cloud.billing.most = real.skus(), 5000

    def launch(self, *argv: str, code: int = 0, **env: str) -> Ran:
        ran = launch(*argv, env={**self.env, **env}, cwd=self.folder)
        assert ran.code == code, ran.shown
        return ran

    def update(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.launch("prices", "--update", "-o", "json").out)
        return found

    def table(self) -> PriceTable | None:
        return price_table.table_in_use(self.env)

    def prices(self) -> Catalog:
        found = self.table()
        assert found
        return Catalog(found)


@pytest.fixture
def home(tmp_path: Path, cloud: GoogleCloud, clock: FakeClock) -> Home:
    clock.advance(days(TODAY) - clock() + 3600)
    return Home(tmp_path, cloud)


def days(date: str) -> float:
    from datetime import UTC, datetime

    return datetime.fromisoformat(date).replace(tzinfo=UTC).timestamp()


def usd(known: Catalog, name: str, model: str = "standard", region: str = "us-central1") -> float | None:
    service: Service = "compute"
    return known.price(known.machines[name][0], service, model, region).usd


# --- Fetching ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 2])
def test_the_check_totals_come_from_the_skus(home: Home, factor: int) -> None:
    """Twice the prices: none of these totals is the shipped one."""
    for row in home.cloud.billing.rows:
        [tier] = row["pricingInfo"][0]["pricingExpression"]["tieredRates"]
        nanos = factor * (int(tier["unitPrice"]["units"]) * 10**9 + tier["unitPrice"]["nanos"])
        tier["unitPrice"].update(units=str(nanos // 10**9), nanos=nanos % 10**9)
    made = home.update()
    assert (made["date"], made["shipped"], made["update"]["skus"]) == (TODAY, False, len(home.cloud.billing.rows))
    known = home.prices()
    assert usd(known, "a3-highgpu-8g") == pytest.approx(factor * 88.49, abs=1e-6)
    assert usd(known, "a3-ultragpu-8g") == pytest.approx(factor * 84.806908, abs=1e-6)
    assert usd(known, "a2-ultragpu-8g") == pytest.approx(factor * 40.550383, abs=1e-6)
    assert usd(known, "g4-standard-48") == pytest.approx(factor * 4.49993, abs=1e-6)
    vcpu, ram = known.component("n1-vcpu", "us-central1"), known.component("n1-ram-gib", "us-central1")
    assert vcpu
    assert ram
    assert 4 * vcpu.listed + 15 * ram.listed == pytest.approx(factor * 0.189999, abs=1e-6)


def test_each_provisioning_model_has_its_own_skus(home: Home) -> None:
    """Google types Flex-start's SKUs, and B200's Spot, as OnDemand."""
    home.update()
    known = home.prices()
    assert usd(known, "a3-highgpu-8g", "flex-start") == pytest.approx(38.320038, abs=0.01)
    assert usd(known, "a4-highgpu-8g") == pytest.approx(128.88)
    assert usd(known, "a4-highgpu-8g", "spot") == pytest.approx(39.6336)
    assert usd(known, "a4-highgpu-8g", "flex-start") == pytest.approx(64.44)
    spot = 8 * 5.8779 + 208 * 0.0153 + 1872 * 0.001332 + 6000 * 0.0428 / 730
    assert usd(known, "a3-highgpu-8g", "spot") == pytest.approx(spot, abs=1e-6)
    assert usd(known, "g4-standard-6") == pytest.approx(0.64688)
    assert usd(known, "g4-standard-24") == pytest.approx(4 * 0.64688)
    mega = known.price(known.machines["a3-megagpu-8g"][0], "compute", "flex-start", "us-central1")
    assert mega.bound  # its vCPUs and memory have no Flex-start SKU: at most their list price


def test_whatever_the_list_lacks_keeps_its_shipped_price_and_date(home: Home) -> None:
    made = home.update()
    known = home.prices()
    assert usd(known, "a3-highgpu-8g", "standard", "europe-west4") == usd(
        SHIPPED, "a3-highgpu-8g", "standard", "europe-west4"
    )
    assert made["update"]["kept"] > 500
    mixed = known.price(known.machines["a2-highgpu-1g"][0], "compute", "spot", "us-central1")
    assert mixed.usd == usd(SHIPPED, "a2-highgpu-1g", "spot")
    assert date_of(known, "a2-highgpu-1g", "us-central1").startswith(f"{TODAY}; 2026-07-30")


def test_all_pages_are_read(home: Home) -> None:
    home.cloud.billing.most = 7
    home.update()
    assert usd(home.prices(), "a3-highgpu-8g") == pytest.approx(88.49)
    asked = [one for one in home.cloud.requests if one.path.endswith("/skus")]
    assert len(asked) == -(-len(home.cloud.billing.rows) // 7)
    assert {one.query["currencyCode"] for one in asked} == {"USD"}


def test_an_api_key_is_enough_and_is_not_in_the_url(home: Home) -> None:
    home.launch("prices", "--update", LAUNCH_API_KEY="my-key", CLOUDSDK_AUTH_DISABLE_CREDENTIALS="")
    assert home.cloud.billing.keys == ["my-key"]
    assert all("key" not in one.query for one in home.cloud.requests)


# --- Faults --------------------------------------------------------------------------------------------------------


def changed(rows: list[dict[str, Any]], start: str, **expression: Any) -> list[dict[str, Any]]:
    """The rows with another pricing expression for one SKU."""
    rows = json.loads(json.dumps(rows))
    [one] = [row for row in rows if row["description"].startswith(start)]
    one["pricingInfo"][0]["pricingExpression"].update(expression)
    return rows


FREE = [{"startUsageAmount": 0, "unitPrice": {"currencyCode": "USD", "units": "0", "nanos": 0}}]
EUROS = [{"startUsageAmount": 0, "unitPrice": {"currencyCode": "EUR", "units": "1", "nanos": 0}}]


@pytest.mark.parametrize(
    ("expression", "word"),
    [
        ({"usageUnit": "min"}, "per min, not h"),
        ({"usageUnit": "mo"}, "per mo, not h"),
        ({"tieredRates": FREE}, "no price"),
        ({"tieredRates": EUROS}, "no price"),
        ({"tieredRates": []}, "no price"),
    ],
)
def test_a_sku_without_a_usable_price_is_not_used(home: Home, expression: Mapping[str, Any], word: str) -> None:
    home.cloud.billing.rows = changed(real.skus(), "Nvidia H100 80GB GPU running in", **expression)
    ran = home.launch("prices", "--update")
    assert word in ran.err
    known = home.prices()
    assert usd(known, "a3-highgpu-8g") == usd(SHIPPED, "a3-highgpu-8g")
    assert usd(known, "a3-ultragpu-8g") == pytest.approx(84.806908)


def test_two_prices_for_one_part_are_unknown(home: Home) -> None:
    second = sku("Nvidia H100 80GB GPU running in Northern Virginia", 1.0, regions=("us-central1",))
    home.cloud.billing.rows = [second, *real.skus()]  # neither the first nor the last price is right
    assert "two prices in us-central1" in home.launch("prices", "--update").err
    known = home.prices()
    assert usd(known, "a3-highgpu-8g") == usd(SHIPPED, "a3-highgpu-8g")
    assert usd(known, "a3-highgpu-8g", "standard", "us-west1") == pytest.approx(88.49)


@pytest.mark.parametrize(
    "rows", [[], [sku("N2 Instance Core running in Americas", 0.03)]], ids=["empty", "no-machines"]
)
def test_a_list_without_machines_changes_nothing(home: Home, rows: list[dict[str, Any]]) -> None:
    home.update()
    kept = home.table()
    home.cloud.billing.rows = rows
    ran = home.launch("prices", "--update", code=1)
    assert "no price of any machine" in ran.err
    assert home.table() == kept


@pytest.mark.parametrize("effect", [Status(403), Status(400, message="API key not valid.")])
def test_a_refusal_changes_nothing(home: Home, effect: Status) -> None:
    home.cloud.faults.add(Fault(SKUS, effect, times=99))
    ran = launch("prices", "--update", env=home.env, cwd=home.folder)
    assert ran.code in (1, 4)
    assert "Cloud Billing" in ran.err
    assert home.table() is None


def test_a_page_that_is_cut_off_is_asked_for_again(
    home: Home, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launcher.clock import Clock

    monkeypatch.setattr("launcher.gcp.price_list.PriceList.__init__.__defaults__", (Clock(clock, clock.advance),))
    home.cloud.faults.add(Fault(SKUS, Truncated(1000)))
    home.update()
    assert usd(home.prices(), "a3-highgpu-8g") == pytest.approx(88.49)


@pytest.mark.parametrize("off", [-DAY, DAY])
def test_the_date_is_googles_whatever_this_machines_clock_says(
    home: Home, off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: days(TODAY) + 3600 + off)
    made = home.update()
    assert made["date"] == TODAY
    assert made["age_days"] == off / DAY
    table = home.table()
    assert table
    assert not price_table.is_old(table.date, days(TODAY) + off)


# --- The cache -----------------------------------------------------------------------------------------------------


def test_plans_use_the_newer_table_and_name_its_date(home: Home) -> None:
    plan = ("vertex", str(ROOT / "job_specs/vertex-2xh100.yaml"), "--dry-run")
    before = json.loads(home.launch(*plan, "-o", "json").out)
    assert before["prices"] == {
        "date": SHIPPED.price_table.date,
        "digest": SHIPPED.price_table.digest,
        "shipped": True,
    }
    home.update()
    table = home.table()
    assert table
    sent = len(home.cloud.requests)
    after = json.loads(home.launch(*plan, "-o", "json").out)
    assert after["prices"] == {"date": TODAY, "digest": table.digest, "shipped": False}
    assert f"prices of {TODAY}" in " ".join(home.launch(*plan).out.split())
    assert home.launch("gpus").out.splitlines()[-1].endswith(f"prices of {TODAY}")
    for offline in (
        home.launch(*plan, "--offline", "-o", "json"),
        home.launch(*plan, "-o", "json", LAUNCH_OFFLINE="1"),
    ):
        assert json.loads(offline.out) == before
    assert len(home.cloud.requests) == sent  # a plan sends no request
    assert before["run"] == after["run"]


def test_a_table_older_than_the_shipped_one_is_not_used(home: Home, clock: FakeClock) -> None:
    clock.advance(days("2026-07-29") - clock())
    home.update()
    assert home.table() is None
    assert json.loads(home.launch("prices", "-o", "json").out)["shipped"] is True


def test_a_damaged_table_is_not_used(home: Home) -> None:
    home.update()
    table = home.table()
    assert table
    file = Path(table.folder) / "prices.csv"
    file.write_text(file.read_text().replace("88.49", "8.849", 1))
    assert home.table() is None
    (file.parent / "price_table.csv").unlink()
    assert home.table() is None
    home.update()
    assert usd(home.prices(), "a3-highgpu-8g") == pytest.approx(88.49)


def test_an_update_replaces_the_table_and_leaves_no_other(home: Home, clock: FakeClock) -> None:
    home.update()
    home.update()  # the same prices
    clock.advance(DAY)
    home.update()
    folder = price_table.cache_folder(home.env)
    assert folder
    assert [one.name[:10] for one in folder.iterdir()] == ["2026-11-24"]


def test_a_cache_that_cannot_be_written_is_an_error(home: Home) -> None:
    (home.folder / ".cache").write_text("a file")
    assert ".cache" in home.launch("prices", "--update", code=1).err
    with pytest.raises(LaunchError, match="HOME"):
        price_table.store_tables({}, {})


def test_a_table_is_old_after_30_days(home: Home) -> None:
    table = SHIPPED.price_table
    now = days(table.date)
    assert not price_table.is_old(table.date, now + 30 * DAY)
    assert price_table.is_old(table.date, now + 31 * DAY)
    assert not price_table.is_old(table.date, now - DAY)  # this machine's clock is a day behind
    assert price_table.is_old(table.date, now - 3 * DAY)


def test_the_regions_of_a_sku_are_its_service_regions(home: Home) -> None:
    """`Americas` is us-central1, us-east1 and us-west1 only."""
    home.update()
    known = home.prices()
    for region in AMERICAS:
        assert date_of(known, "a2-highgpu-8g", region).startswith(TODAY), region
    assert TODAY not in date_of(known, "a2-highgpu-8g", "us-west4")


def date_of(known: Catalog, machine: str, region: str) -> str:
    rows = tables.rows("prices", known.price_table.folder)
    return next(row["date"] for row in rows if (row["machine"], row["region"]) == (machine, region))
