"""The network interfaces of this host and their IPv4 addresses. Not here: which of them is used for what (process_group.py)."""

import contextlib
import fcntl
import socket
import struct

ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR, see netdevice(7)


def addresses() -> dict[str, str]:
    """Interface to its IPv4 address; interfaces without one are left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                held = fcntl.ioctl(sock.fileno(), ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(held[20:24])
    return found


def interface_of(address: str) -> str | None:
    """The network interface that holds an IPv4 address of this host; None if none does (IPv6, NAT)."""
    return next((name for name, held in addresses().items() if held == address), None)
