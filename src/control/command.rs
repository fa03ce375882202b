//! The commands that the daemons of drivers 535 to 580 know, as values that cannot be malformed.
//!
//! The daemon answers most mistakes with silence and status 0, and some by dropping a limit that was in force
//! (a UUID in the place of an ordinal clears GPU 0's limit), so a mistake must not reach it.

use std::fmt;
use std::num::NonZeroU32;

use crate::gpu::{Inventory, Uuid};
use crate::quantity::{MemoryQuantity, Percentage};
use crate::size::Priority;

/// The number of a process on the host, at least 1. (0 is what the daemon makes of a number it cannot read.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pid(NonZeroU32);

/// A GPU as the daemon counts: in the order of the bus, which is the driver's own, where it was started with
/// `CUDA_DEVICE_ORDER=PCI_BUS_ID` (the daemon room does). Only an inventory makes one, since an ordinal that does not exist voids the limits of the others
/// (seen on an H200 with driver 580.159).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ordinal(u32);

/// A memory limit that the daemon can hold: 1 MiB up to 2^43 MiB.
///
/// 0 and what is more than 2^64 bytes would clear the limit instead (seen with 535 and 550).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemoryLimit(MemoryQuantity);

/// One command, written as the daemon reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// The servers' process numbers.
    GetServerList,
    /// How a server is; from 550 on.
    GetServerStatus(Pid),
    /// The process numbers of a server's clients.
    GetClientList(Pid),
    /// The GPUs, each with its clients, of one server or of all.
    GetDeviceClientList(Option<Pid>),
    /// The clients in full, of one server or of all.
    Ps(Option<Pid>),
    /// Starts a server before the first client needs it.
    StartServer {
        /// The user it works for.
        uid: u32,
    },
    /// Ends a server once its clients are gone, or at once.
    ShutdownServer {
        /// Which.
        server: Pid,
        /// Whether clients are ended with it.
        force: bool,
    },
    /// Ends what a client does on the GPU. Its process gets error 810 and lives on.
    TerminateClient {
        /// The server it is a client of.
        server: Pid,
        /// The client.
        client: Pid,
    },
    /// What the next server will start with.
    GetDefaultActiveThreadPercentage,
    /// Sets what the next server will start with.
    SetDefaultActiveThreadPercentage(Percentage),
    /// What a server's next client will get.
    GetActiveThreadPercentage(Pid),
    /// Sets what a server's next client will get.
    SetActiveThreadPercentage(Pid, Percentage),
    /// What the next server will start with.
    GetDefaultDevicePinnedMemLimit(Ordinal),
    /// Sets what the next server will start with, or clears it.
    SetDefaultDevicePinnedMemLimit(Ordinal, Option<MemoryLimit>),
    /// What a server's next client will get.
    GetDevicePinnedMemLimit(Pid, Ordinal),
    /// Sets what a server's next client will get.
    SetDevicePinnedMemLimit(Pid, Ordinal, MemoryLimit),
    /// What a client gets that does not ask.
    GetDefaultClientPriority,
    /// Sets what a client gets that does not ask.
    SetDefaultClientPriority(Priority),
    /// Ends the servers and the daemon.
    Quit {
        /// After how many seconds clients are ended too; where `None`, it waits for them.
        force_after: Option<u32>,
    },
}

impl Pid {
    /// As the kernel counts, 1 and above.
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

impl TryFrom<u32> for Pid {
    type Error = std::num::TryFromIntError;

    fn try_from(pid: u32) -> Result<Self, Self::Error> {
        i32::try_from(pid)?;
        NonZeroU32::try_from(pid).map(Self)
    }
}

impl TryFrom<i32> for Pid {
    type Error = std::num::TryFromIntError;

    fn try_from(pid: i32) -> Result<Self, Self::Error> {
        Self::try_from(u32::try_from(pid)?)
    }
}

impl Ordinal {
    /// The GPU's place among the GPUs of the host, where it is one of them.
    pub fn of(inventory: &Inventory, gpu: &Uuid) -> Option<Self> {
        let position = inventory.gpus.iter().position(|known| known.uuid == *gpu)?;
        u32::try_from(position).ok().map(Self)
    }

    /// All GPUs of the host.
    pub fn all(inventory: &Inventory) -> impl Iterator<Item = Self> {
        (0..).take(inventory.gpus.len()).map(Self)
    }

    /// Counted from 0.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl MemoryLimit {
    /// The limit of that much, where the daemon can hold it.
    pub const fn new(memory: MemoryQuantity) -> Option<Self> {
        if memory.mib() >= 1 && memory.mib() <= 1 << 43 { Some(Self(memory)) } else { None }
    }

    /// How much.
    pub const fn memory(self) -> MemoryQuantity {
        self.0
    }
}

impl Command {
    /// Its first word, for a message.
    pub fn name(self) -> String {
        let written = self.to_string();
        written.split_once(' ').map_or(written.clone(), |(name, _)| name.to_owned())
    }
}

impl fmt::Display for Pid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Ordinal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GetServerList => f.write_str("get_server_list"),
            Self::GetServerStatus(server) => write!(f, "get_server_status {server}"),
            Self::GetClientList(server) => write!(f, "get_client_list {server}"),
            Self::GetDeviceClientList(None) => f.write_str("get_device_client_list"),
            Self::GetDeviceClientList(Some(server)) => write!(f, "get_device_client_list {server}"),
            Self::Ps(None) => f.write_str("ps"),
            Self::Ps(Some(server)) => write!(f, "ps -p {server}"),
            Self::StartServer { uid } => write!(f, "start_server -uid {uid}"),
            Self::ShutdownServer { server, force } => {
                write!(f, "shutdown_server {server}{}", if *force { " -f" } else { "" })
            }
            Self::TerminateClient { server, client } => write!(f, "terminate_client {server} {client}"),
            Self::GetDefaultActiveThreadPercentage => f.write_str("get_default_active_thread_percentage"),
            Self::SetDefaultActiveThreadPercentage(percentage) => {
                write!(f, "set_default_active_thread_percentage {percentage}")
            }
            Self::GetActiveThreadPercentage(server) => write!(f, "get_active_thread_percentage {server}"),
            Self::SetActiveThreadPercentage(server, percentage) => {
                write!(f, "set_active_thread_percentage {server} {percentage}")
            }
            Self::GetDefaultDevicePinnedMemLimit(gpu) => {
                write!(f, "get_default_device_pinned_mem_limit {gpu}")
            }
            // a limit of 0G is none (seen with 535 and 550)
            Self::SetDefaultDevicePinnedMemLimit(gpu, None) => {
                write!(f, "set_default_device_pinned_mem_limit {gpu} 0G")
            }
            Self::SetDefaultDevicePinnedMemLimit(gpu, Some(limit)) => {
                write!(f, "set_default_device_pinned_mem_limit {gpu} {}", limit.0.as_mps_limit())
            }
            Self::GetDevicePinnedMemLimit(server, gpu) => {
                write!(f, "get_device_pinned_mem_limit {server} {gpu}")
            }
            Self::SetDevicePinnedMemLimit(server, gpu, limit) => {
                write!(f, "set_device_pinned_mem_limit {server} {gpu} {}", limit.0.as_mps_limit())
            }
            Self::GetDefaultClientPriority => f.write_str("get_default_client_priority"),
            Self::SetDefaultClientPriority(priority) => {
                write!(f, "set_default_client_priority {}", priority.as_mps())
            }
            Self::Quit { force_after: None } => f.write_str("quit"),
            Self::Quit { force_after: Some(seconds) } => write!(f, "quit -t {seconds}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_written_as_the_daemon_reads_them() {
        let (server, client) = (Pid::try_from(488u32).unwrap(), Pid::try_from(497u32).unwrap());
        let limit = MemoryLimit::new("1536MiB".parse().unwrap()).unwrap();
        for (command, written) in [
            (Command::Ps(Some(server)), "ps -p 488"),
            (Command::ShutdownServer { server, force: true }, "shutdown_server 488 -f"),
            (Command::TerminateClient { server, client }, "terminate_client 488 497"),
            (
                Command::SetActiveThreadPercentage(server, "12.5".parse().unwrap()),
                "set_active_thread_percentage 488 12.5",
            ),
            (
                Command::SetDevicePinnedMemLimit(server, Ordinal(1), limit),
                "set_device_pinned_mem_limit 488 1 1536M",
            ),
            (
                Command::SetDefaultDevicePinnedMemLimit(Ordinal(0), None),
                "set_default_device_pinned_mem_limit 0 0G",
            ),
            (Command::SetDefaultClientPriority(Priority::BelowNormal), "set_default_client_priority 1"),
            (Command::Quit { force_after: Some(2) }, "quit -t 2"),
        ] {
            assert_eq!(command.to_string(), written);
        }
        assert_eq!(Command::Ps(Some(server)).name(), "ps");
    }

    #[test]
    fn what_the_daemon_would_misread_cannot_be_made() {
        assert_eq!(MemoryLimit::new(MemoryQuantity::ZERO), None);
        assert_eq!(MemoryLimit::new(MemoryQuantity::MAX), None);
        assert!(
            Pid::try_from(0u32).is_err()
                && Pid::try_from(-1i32).is_err()
                && Pid::try_from(1u32 << 31).is_err()
        );
        let nobody = Uuid::try_from("GPU-11111111-2222-3333-4444-555555555555".to_owned()).unwrap();
        assert_eq!(Ordinal::of(&Inventory::default(), &nobody), None);
    }
}
