//! What the real control daemons were seen to answer while they have no server, mistakes and all.

use std::collections::BTreeMap;

/// What lives in the daemon and is gone with it.
pub struct Daemon {
    version: u32,
    percentage: f64,
    priority: u32,
    /// MiB, by device; what is not there has no limit.
    limits: BTreeMap<i64, u64>,
    pub has_quit: bool,
}

impl Daemon {
    pub fn new(version: u32) -> Self {
        Self { version, percentage: 100.0, priority: 0, limits: BTreeMap::new(), has_quit: false }
    }

    pub fn answer(&mut self, command: &str, privileged: bool) -> String {
        let words: Vec<&str> = command.split_ascii_whitespace().collect();
        let word = |position: usize| words.get(position).copied().unwrap_or_default();
        let server = leading_number(word(1)).map_or(0, |(number, _)| number);
        let name = word(0);
        if !privileged && name == "quit" {
            return "Not enough privilege to execute quit command\n".to_owned();
        }
        if !privileged && name.starts_with("set_default") && self.version >= 550 {
            return "Insufficient privileges for UID 0. Control deamon settings can only be modified by the user \
                    started it or by the root user.\n"
                .to_owned();
        }
        match name {
            "get_server_list" | "start_server" => String::new(),
            "get_device_client_list" if server == 0 => String::new(),
            "get_server_status" if self.version >= 550 && server == 0 => {
                "A server PID is required\n".to_owned()
            }
            "get_server_status" if self.version < 550 => unknown(name),
            "ps" if word(1) == "-p" => format!("Server {0} not found\nServer {0} not found\n\n", word(2)),
            "ps" => "Server not found\n".to_owned(),
            "get_client_list"
            | "get_server_status"
            | "get_device_client_list"
            | "shutdown_server"
            | "get_active_thread_percentage"
            | "set_active_thread_percentage"
            | "get_device_pinned_mem_limit"
            | "set_device_pinned_mem_limit" => format!("Server {server} not found\n"),
            "terminate_client" => format!("Server {server} not found\nServer {server} not found!\n1\n"),
            "get_default_active_thread_percentage" => format!("{:.1}\n", self.percentage),
            "set_default_active_thread_percentage" => {
                self.percentage = percentage(word(1)).unwrap_or(self.percentage);
                format!("{:.1}\n", self.percentage)
            }
            "get_default_client_priority" => format!("{}\n", self.priority),
            "set_default_client_priority" => self.set_priority(server),
            "get_default_device_pinned_mem_limit" => {
                self.limits.get(&server).map_or(String::new(), |mib| shown(*mib))
            }
            "set_default_device_pinned_mem_limit" => self.set_limit(word(1), word(2)),
            "quit" => {
                self.has_quit = true;
                String::new()
            }
            _ => unknown(name),
        }
    }

    fn set_priority(&mut self, priority: i64) -> String {
        match u32::try_from(priority) {
            Ok(known @ 0..=1) => {
                self.priority = known;
                String::new()
            }
            _ => "Invalid priority value - must be 0 or 1!\n".to_owned(),
        }
    }

    /// What is malformed in either word is the device 0, or no limit.
    fn set_limit(&mut self, device: &str, limit: &str) -> String {
        let (device, limit) = match leading_number(device) {
            Some((device, "")) => (device, limit),
            _ => (0, ""),
        };
        match mib(limit) {
            Some(mib) => self.limits.insert(device, mib),
            None => self.limits.remove(&device),
        };
        String::new()
    }
}

fn unknown(command: &str) -> String {
    format!("Unknown command \"{command}\"\n")
}

/// In (0, 100]; anything else leaves the old value.
fn percentage(word: &str) -> Option<f64> {
    word.parse::<f64>().ok().filter(|percentage| *percentage > 0.0 && *percentage <= 100.0)
}

/// A number is MiB unless a G follows it at once; 0, nothing and more than 64 bits of bytes are no limit.
fn mib(word: &str) -> Option<u64> {
    let (number, unit) = leading_number(word)?;
    let mib = u64::try_from(number).ok()?.checked_mul(if unit.starts_with(['G', 'g']) { 1024 } else { 1 })?;
    (1..1 << 44).contains(&mib).then_some(mib)
}

fn shown(mib: u64) -> String {
    if mib >= 1024 { format!("{}G\n", mib / 1024) } else { format!("{mib}M\n") }
}

fn leading_number(word: &str) -> Option<(i64, &str)> {
    let end = word.find(|c: char| !c.is_ascii_digit()).unwrap_or(word.len());
    word[..end].parse().ok().map(|number| (number, &word[end..]))
}

pub fn help(version: u32) -> String {
    let first = "CUDA MPS Control for Linux/Unix. (a stand-in for tests)\n\n  This program allows multiple CUDA processes to \
                 share a single GPU context.\n\n";
    let options = "OPTIONS:\n  -h,--help                Print this message\n  -d,--daemon              Setup the daemon in \
                   the background\n  -M,--multiuser-server    Enable multi-user mode\n";
    if version >= 580 { format!("{first}{options}") } else { first.to_owned() }
}
