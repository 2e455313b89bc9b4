"""Explain an SSH failure from the output of ssh and gcloud's tunnel, with a fix. Pure.

The patterns match the messages of OpenSSH 7 to 10 (its source), of gcloud 528
(googlecloudsdk/api_lib/compute/iap_tunnel_*.py) and of Google's relay:
https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-ssh-errors and
https://cloud.google.com/iap/docs/faq.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from launcher.errors import LaunchError, NotAuthorised
from launcher.jobs.vm import VmInstance, last_url_part

FAILED: Final = 255
"""ssh's exit code for its own failures; a remote command may exit with it too."""
COMMAND_EXITED: Final = re.compile(r"^debug1: Exit status \d+\r?$", re.M)
"""In ssh's log (LogLevel DEBUG1): the remote command exited by itself. Otherwise ssh logs -1, or nothing."""
KILLED: Final = re.compile(r"^debug1: .* rtype exit-signal ", re.M)
"""In ssh's log: a signal killed the remote command."""
SENT: Final = re.compile(r"^debug1: Sending command: .*?(?=^debug\d: |\Z)", re.M | re.S)
"""In ssh's log: the remote command, with all of its lines."""
SHOWN_LINES: Final = 3
"""Lines of an unknown failure in the error."""
NOISE: Final = re.compile(
    r"^(debug\d: .*|Warning: Permanently added .*|Connection to \S+ closed\.|Authenticated to .*|Transferred: sent .*"
    r"|Bytes per second: sent .*|WARNING:.*|To increase the performance of the tunnel.*"
    r"|please see https://cloud\.google\.com/iap/.*|\*\* WARNING: connection is not using a post-quantum .*"
    r"|\*\* (This session may be vulnerable|The server may need to be upgraded).*|Pseudo-terminal will not be .*|)$"
)
"""Lines that do not indicate an error."""


class Cause(NamedTuple):
    """A failure, recognised by a pattern. `passing`: it also occurs while a VM boots, so waiting may help. `denied`: a
    permission is missing."""

    pattern: str
    problem: str
    hint: str
    passing: bool = False
    denied: bool = False


class Explained(NamedTuple):
    """The error, and whether waiting may help."""

    error: LaunchError
    passing: bool = False


FIREWALL: Final = (
    "Just created or started? Try again in a minute.\nOtherwise a firewall rule is missing:\n"
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
        "gcloud, which opens the tunnel to {name}, is not logged in",
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
        "no answer from port {port} of {name} through the tunnel (IAP):\n    {code}",
        FIREWALL,
        passing=True,
    ),
    Cause(
        r"\[4047|\[4010",
        "the tunnel (IAP) can't find a running VM {name}:\n    {code}",
        "Just created or started? Try again in a minute.\nIs it running? launch vm status {name}",
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
        "the host key of {name} has changed:\nit may not be the VM that you mean",
        "If its host keys were replaced on purpose:\nssh-keygen -R compute.{number} \\\n    -f {known_hosts}",
    ),
    Cause(
        r"Permission denied \(|Too many authentication failures",
        "{name} refused the SSH key of {user}: permission denied (publickey)",
        GRANT.replace("{role}", "compute.osAdminLogin") + "{service_account}\nA new grant takes a minute or two.",
        passing=True,
        denied=True,
    ),
    Cause(
        r"Address already in use|Could not request local forwarding|cannot listen to port",
        "can't forward a port of this machine:\n    {said}",
        "Choose another local port: --port-forward LOCAL:REMOTE",
    ),
    Cause(
        r"Connection refused",
        "{name} refuses SSH connections",
        "Just created or started? Try again in a minute.\nOtherwise: launch vm status {name}",
        passing=True,
    ),
    Cause(
        r"connect to host \S+ port \d+: (Connection|Operation) timed out|No route to host|Network is unreachable"
        r"|connect to host",
        "can't connect to {name}:\n    {said}",
        "Just created or started? Try again in a minute.\nOtherwise a firewall may block it;\n"
        "to use Google's tunnel: --iap",
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
"""The first match counts, so the tunnel's messages come before ssh's."""


def explain(log: str, machine: VmInstance, facts: Mapping[str, str]) -> Explained | None:
    """Return why ssh exited with `FAILED`, from its log; None: the remote command exited with it.

    `facts`: user, port, account, member, known_hosts.
    """
    if COMMAND_EXITED.search(SENT.sub("", log)):
        return None
    if not (lines := relevant_lines(log)):  # ssh prints the reason to the terminal only
        problem, hint = f"the connection to {machine.name} was lost", f"Was it stopped? launch vm status {machine.name}"
        if KILLED.search(log):
            problem = f"a signal killed the command on {machine.name}"
            hint = f"Out of memory? launch ssh {machine.name} -- 'sudo dmesg | tail'"
        return Explained(LaunchError(problem, hint), passing=True)
    text = "\n".join(lines)
    relay = re.search(r"\[(\d{4}): '?([^'\]]*)", text)
    code = f"{relay[1]}: {relay[2]}" if relay else ""
    words = {**facts_of_machine(machine), **facts, "said": lines[-1], "code": code}
    for cause in CAUSES:
        if re.search(cause.pattern, text):
            kind = NotAuthorised if cause.denied else LaunchError
            line = next((text_line for text_line in lines if re.search(cause.pattern, text_line)), lines[-1])
            prefix = r"^(ERROR: )?(\([\w.-]+\) |\[\d+\] )?(Error during local connection to \[\w+\]: )?"
            words["said"] = re.sub(prefix, "", line)[:200]
            return Explained(kind(fill_in(cause.problem, words), fill_in(cause.hint, words)), cause.passing)
    message = "\n".join(lines[-SHOWN_LINES:])
    return Explained(LaunchError(f"ssh to {machine.name} failed: {message}"))


def relevant_lines(log: str) -> list[str]:
    """Return the log's lines without the remote command and `NOISE`."""
    return [line for line in map(str.strip, SENT.sub("", log).splitlines()) if not NOISE.match(line)]


def facts_of_machine(machine: VmInstance) -> dict[str, str]:
    """Return a VM's values for the templates."""
    interfaces = machine.request.get("networkInterfaces") or [{}]
    accounts = machine.request.get("serviceAccounts") or [{}]
    email = accounts[0].get("email", "")
    act = f"\ngcloud iam service-accounts add-iam-policy-binding \\\n    {email} --project={machine.project} "
    grant = "\\\n    --role=roles/iam.serviceAccountUser --member={member}"
    return {
        "name": machine.name,
        "project": machine.project,
        "number": machine.id,
        "network": last_url_part(interfaces[0].get("network", "")) or "default",
        "service_account": act + grant if email else "",
    }


def fill_in(text: str, words: Mapping[str, str]) -> str:
    """Replace {name} in a template by values, which may contain {name} themselves."""
    for _ in range(2):
        text = re.sub(r"\{(\w+)\}", lambda match: words.get(match[1], match[0]), text)
    return text
