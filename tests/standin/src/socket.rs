//! `SOCK_SEQPACKET` sockets, which std does not have. Each packet is one command or one answer.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

pub struct Socket(OwnedFd);

impl Socket {
    fn new() -> io::Result<Self> {
        // SAFETY: takes no pointers; the descriptor that it gives belongs to nobody else.
        unsafe {
            let descriptor =
                check(libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0))?;
            Ok(Self(OwnedFd::from_raw_fd(descriptor)))
        }
    }

    pub fn connect(path: &Path) -> io::Result<Self> {
        let (socket, address) = (Self::new()?, address(path)?);
        // SAFETY: the address is a whole `sockaddr_un` and outlives the call.
        check(unsafe {
            libc::connect(socket.0.as_raw_fd(), (&raw const address).cast(), size_of_val(&address) as u32)
        })?;
        Ok(socket)
    }

    pub fn listen(path: &Path, mode: u32) -> io::Result<Self> {
        let (socket, address) = (Self::new()?, address(path)?);
        let _ = std::fs::remove_file(path);
        // SAFETY: the address is a whole `sockaddr_un` and outlives the call.
        check(unsafe {
            libc::bind(socket.0.as_raw_fd(), (&raw const address).cast(), size_of_val(&address) as u32)
        })?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
        // SAFETY: takes no pointers.
        check(unsafe { libc::listen(socket.0.as_raw_fd(), 128) })?;
        Ok(socket)
    }

    pub fn send(&self, packet: &[u8]) -> io::Result<()> {
        // SAFETY: the bytes outlive the call, and the length is theirs.
        let sent = unsafe {
            libc::send(self.0.as_raw_fd(), packet.as_ptr().cast(), packet.len(), libc::MSG_NOSIGNAL)
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// The next packet; nothing at the end.
    pub fn receive(&self) -> io::Result<Option<Vec<u8>>> {
        let mut packet = vec![0; 4096];
        // SAFETY: the bytes outlive the call, and the length is theirs.
        let length = unsafe { libc::recv(self.0.as_raw_fd(), packet.as_mut_ptr().cast(), packet.len(), 0) };
        if length < 0 {
            return Err(io::Error::last_os_error());
        }
        packet.truncate(length as usize);
        Ok((length > 0).then_some(packet))
    }
}

/// The next connection to either, and whether it came to the first one.
pub fn accept_either(one: &Socket, other: &Socket) -> io::Result<(bool, Socket)> {
    let mut waiting = [one, other].map(|socket| libc::pollfd {
        fd: socket.0.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    });
    // SAFETY: the array outlives the call, and the length is its own.
    check(unsafe { libc::poll(waiting.as_mut_ptr(), 2, -1) })?;
    let first = waiting[0].revents != 0;
    let listener = if first { one } else { other };
    // SAFETY: no address is asked for; the descriptor that it gives belongs to nobody else.
    unsafe {
        let descriptor =
            check(libc::accept(listener.0.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut()))?;
        Ok((first, Socket(OwnedFd::from_raw_fd(descriptor))))
    }
}

fn address(path: &Path) -> io::Result<libc::sockaddr_un> {
    // SAFETY: all fields of the structure are numbers, for which 0 is a value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    let bytes = path.as_os_str().as_encoded_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok(address)
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
