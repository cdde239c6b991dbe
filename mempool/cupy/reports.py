"""Report of several devices."""

from __future__ import annotations

from mempool.reporting.report import Report


class DeviceReports(Report):
    """Reports of each device under ``devices``, by index, with the total number of allocations."""

    @property
    def has_work(self) -> bool:
        """True if the report of any device has work, see `Report.has_work`."""
        return any(Report(values).has_work for values in self.values["devices"].values())

    @property
    def verdict(self) -> str:
        """One line for each device."""
        each = [Report(values).verdict for values in self.values["devices"].values()]
        return "\n".join(each) or f"{self.values['name']}: nothing was allocated"

    def rows(self) -> list[tuple[str, str]]:
        """Return labels and values as people read them, device after device."""
        return [
            (f"device {index}: {label}", value)
            for index, values in self.values["devices"].items()
            for label, value in Report(values).rows()
        ]


def of_devices(name: str, reports: dict[int, Report]) -> Report:
    """Combine the reports of several devices; a single report is returned unchanged."""
    if len(reports) == 1:
        return next(iter(reports.values()))
    devices = {str(index): report.to_dict() for index, report in reports.items()}
    allocations = sum(values["allocations"] for values in devices.values())
    return DeviceReports({"name": name, "allocations": allocations, "devices": devices})
