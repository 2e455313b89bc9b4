"""Why SSH didn't come through, by what ssh and gcloud's tunnel said: in launch's words, with what to do. Pure.

The words are those of OpenSSH 7 to 10 (its source), of gcloud 528 (googlecloudsdk/api_lib/compute/iap_tunnel_*.py) and
of Google's relay: https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-ssh-errors and
https://cloud.google.com/iap/docs/faq.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from launcher.errors import LaunchError, NotAuthorised
from launcher.jobs.vm import Machine, last

FAILED: Final = 255
"""ssh's exit code for a failure of its own; a remote command may end with it too."""
ITS_OWN: Final = re.compile(r"^debug1: Exit status \d+\r?$", re.M)
"""In ssh's log (LogLevel DEBUG1): the remote command has ended by itself. Else it says -1, or nothing."""
KILLED: Final = re.compile(r"^debug1: .* rtype exit-signal ", re.M)
"""In ssh's log: a signal has ended the remote command."""
SENT: Final = re.compile(r"^debug1: Sending command: .*?(?=^debug\d: |\Z)", re.M | re.S)
"""In ssh's log: the remote command, with all of its lines."""
KEPT: Final = 3
"""Lines of an unknown failure that are shown."""
NOISE: Final = re.compile(
    r"^(debug\d: .*|Warning: Permanently added .*|Connection to \S+ closed\.|Authenticated to .*|Transferred: sent .*"
    r"|Bytes per second: sent .*|WARNING:.*|To increase the performance of the tunnel.*"
    r"|please see https://cloud\.google\.com/iap/.*|\*\* WARNING: connection is not using a post-quantum .*"
    r"|\*\* (This session may be vulnerable|The server may need to be upgraded).*|Pseudo-terminal will not be .*|)$"
)
"""What both say without anything being wrong."""


class Cause(NamedTuple):
    """A failure, recognised by a pattern. `passing`: it also looks like that while a VM boots, and then ends by
    itself. `denied`: a right is missing."""

    pattern: str
    problem: str
    hint: str
    passing: bool = False
    denied: bool = False


class Explained(NamedTuple):
    """What went wrong, and whether waiting may help."""

    error: LaunchError
    passing: bool = False


FIREWALL: Final = (
    "Just made or started: try again in a minute. Else a firewall rule is missing:\n"
    "gcloud compute firewall-rules create allow-ssh-from-iap --project={project} \\\n"
    "    --network={network} --direction=INGRESS --allow=tcp:22 \\\n"
    "    --source-ranges=35.235.240.0/20"
)
GRANT: Final = "gcloud projects add-iam-policy-binding {project} \\\n    --member={member} --role=roles/{role}"
LOG_IN: Final = "gcloud auth login"

CAUSES: Final = (
    Cause(
        r"You do not currently have an active account|does not have any valid credentials|Reauthentication"
        r"|problem refreshing your current auth tokens|invalid_grant",
        "gcloud, which opens the tunnel to {name}, isn't logged in",
        LOG_IN,
        denied=True,
    ),
    Cause(
        r"\[4033|Handshake status 40[13]",
        "{account} may not open a tunnel (IAP) to {name}: not authorized (4033)",
        GRANT.replace("{role}", "iap.tunnelResourceAccessor") + "\nA new grant takes a minute or two.",
        denied=True,
    ),
    Cause(
        r"\[4003",
        "port {port} of {name} doesn't answer the tunnel (IAP):\n    {code}",
        FIREWALL,
        passing=True,
    ),
    Cause(
        r"\[4047|\[4010",
        "the tunnel (IAP) doesn't find {name} running:\n    {code}",
        "Just made or started: try again in a minute.\nIs it running? launch vm status {name}",
        passing=True,
    ),
    Cause(
        r"Error while connecting|Error during local connection|Handshake status|ERROR: \(gcloud\.",
        "gcloud can't open a tunnel (IAP) to {name}:\n    {said}",
        "A proxy or firewall must let WebSockets through to tunnel.cloudproxy.app.",
        passing=True,
    ),
    Cause(
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed|host key is known for",
        "{name} shows another host key than the one it is known by:\nit may not be the VM that you mean",
        "If its host keys were made anew on purpose:\nssh-keygen -R compute.{number} \\\n    -f {known_hosts}",
    ),
    Cause(
        r"Permission denied \(|Too many authentication failures",
        "{name} doesn't let {user} in: permission denied (publickey)",
        GRANT.replace("{role}", "compute.osAdminLogin") + "{service_account}\nA new grant takes a minute or two.",
        passing=True,
        denied=True,
    ),
    Cause(
        r"Address already in use|Could not request local forwarding|cannot listen to port",
        "a port of this machine can't be forwarded:\n    {said}",
        "--port-forward LOCAL:REMOTE takes another one here.",
    ),
    Cause(
        r"Connection refused",
        "{name} refuses SSH connections",
        "Just made or started: try again in a minute. Else: launch vm status {name}",
        passing=True,
    ),
    Cause(
        r"connect to host \S+ port \d+: (Connection|Operation) timed out|No route to host|Network is unreachable"
        r"|connect to host",
        "{name} can't be reached:\n    {said}",
        "Just made or started: try again in a minute. Else a firewall is in the way:\n"
        "--iap goes through Google's tunnel.",
        passing=True,
    ),
    Cause(
        r"closed by remote host|Broken pipe|Connection reset|server \S+ not responding|Connection timed out"
        r"|[Cc]onnection closed",
        "the connection to {name} was lost:\n    {said}",
        "Was it stopped? launch vm status {name}",
        passing=True,
    ),
)
"""The first that fits counts: what the tunnel says comes before what ssh makes of it."""


def explained(log: str, machine: Machine, facts: Mapping[str, str]) -> Explained | None:
    """Why ssh has ended with `FAILED`, by its log; None: the remote command did.

    `facts` are what the machine doesn't tell: user, port, account, known_hosts.
    """
    if ITS_OWN.search(SENT.sub("", log)):
        return None
    if not (lines := relevant_lines(log)):
        return Explained(silent(log, machine), passing=True)
    text = "\n".join(lines)
    words = {**of_machine(machine), **facts, "said": lines[-1], "code": code_of(text)}
    for cause in CAUSES:
        if re.search(cause.pattern, text):
            kind = NotAuthorised if cause.denied else LaunchError
            said = next((one for one in lines if re.search(cause.pattern, one)), lines[-1])
            words["said"] = shortened(said)
            return Explained(kind(filled(cause.problem, words), filled(cause.hint, words)), cause.passing)
    said = "\n".join(lines[-KEPT:])
    return Explained(LaunchError(f"ssh to {machine.name} failed: {said}"))


def silent(log: str, machine: Machine) -> LaunchError:
    """The end of a connection that ssh's log says nothing about: it writes that to the terminal alone."""
    if KILLED.search(log):
        problem = f"a signal has ended the command on {machine.name}"
        return LaunchError(problem, f"Out of memory, maybe: launch ssh {machine.name} -- 'sudo dmesg | tail'")
    return LaunchError(f"the connection to {machine.name} was lost", f"Was it stopped? launch vm status {machine.name}")


def relevant_lines(log: str) -> list[str]:
    """The lines that say something."""
    return [line for line in map(str.strip, SENT.sub("", log).splitlines()) if not NOISE.match(line)]


def shortened(said: str) -> str:
    """A line without what it begins with in every case."""
    return re.sub(r"^(ERROR: )?(\([\w.-]+\) |\[\d+\] )?(Error during local connection to \[\w+\]: )?", "", said)[:200]


def code_of(text: str) -> str:
    """The relay's number for it."""
    found = re.search(r"\[(\d{4}): '?([^'\]]*)", text)
    return f"{found[1]}: {found[2]}" if found else ""


def of_machine(machine: Machine) -> dict[str, str]:
    """What the texts name of a VM."""
    interfaces = machine.request.get("networkInterfaces") or [{}]
    accounts = machine.request.get("serviceAccounts") or [{}]
    email = accounts[0].get("email", "")
    act = f"\ngcloud iam service-accounts add-iam-policy-binding \\\n    {email} --project={machine.project} "
    grant = "\\\n    --role=roles/iam.serviceAccountUser --member={member}"
    return {
        "name": machine.name,
        "project": machine.project,
        "number": machine.id,
        "network": last(interfaces[0].get("network", "")) or "default",
        "service_account": act + grant if email else "",
    }


def filled(text: str, words: Mapping[str, str]) -> str:
    """A template with its words, which may hold others."""
    for _ in range(2):
        text = re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], found[0]), text)
    return text
