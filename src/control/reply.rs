//! What the daemon's answers mean. Pure: text in, values out; what is not understood is nobody's guess.

use std::fmt;

use super::command::Pid;
use crate::quantity::{MemoryQuantity, Percentage};
use crate::size::Priority;

/// A percentage as the daemon shows it: with one decimal, rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShownPercentage {
    tenths: u32,
}

/// A memory limit as the daemon shows it: whole GiB from 1 GiB on, rounded down, else whole MiB.
///
/// It is only shown so: a limit of 1536M reads back as `1G` and gives a client 1536 MiB (driver 580.159).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShownMemory(MemoryQuantity);

/// How a server is (NVIDIA's MPS guide, `get_server_status`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerStatus {
    /// It starts.
    Initializing,
    /// It serves.
    Active,
    /// A client made it fail; it takes no new ones until the others are gone.
    Fault,
}

/// One line of `ps`.
///
/// A process writes its own name: whoever chooses `argv[0]` can put a line break and a made-up client there (done
/// with driver 580.159), or words that make the whole answer unreadable. Good for showing; for deciding use [`super::Control::client_list`], which has numbers only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// On the host.
    pub pid: Pid,
    /// The server's number for it.
    pub id: u32,
    /// Its server.
    pub server: Pid,
    /// The first 22 characters of the GPU's UUID.
    pub device: String,
    /// The inode of its PID namespace.
    pub namespace: u64,
    /// Its name for itself.
    pub command: String,
}

/// One GPU of `get_device_client_list`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceClients {
    /// As the server counts.
    pub ordinal: u32,
    /// Place on the bus, and the product's name.
    pub name: String,
    /// Each client with the number of its context.
    pub clients: Vec<(Pid, u32)>,
}

/// The daemon's way of saying no, with status 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// `Unknown command "…"`
    UnknownCommand,
    /// `Insufficient privileges …`, `Not enough privilege …`
    Privileges(String),
    /// `Server 42 not found`, `Server not found`
    NoServer(Option<u32>),
    /// `Invalid …`, `A server PID is required`, `Server 42 is <busy>`
    Other(String),
}

/// Parts an answer from the answer to the question behind it, which is always a percentage. Nothing where that is
/// missing: the answer was cut short.
pub(super) fn before_last(text: &str) -> Option<(&str, ShownPercentage)> {
    let text = text.strip_suffix('\n')?;
    let (before, last) = text.rsplit_once('\n').map_or(("", text), |(before, last)| (before, last));
    Some((before, percentage(last)?))
}

/// Whether the answer is a refusal. Only its first line is looked at: further down are words of others.
pub(super) fn refusal(text: &str) -> Option<Refusal> {
    let first = text.lines().next()?.trim_end();
    if first.starts_with("Unknown command \"") {
        return Some(Refusal::UnknownCommand);
    }
    if first.starts_with("Insufficient privileges") || first.starts_with("Not enough privilege") {
        return Some(Refusal::Privileges(first.to_owned()));
    }
    if let Some(which) = first.strip_prefix("Server").and_then(|rest| rest.strip_suffix("not found")) {
        return Some(Refusal::NoServer(which.trim().parse().ok()));
    }
    let known = ["Invalid ", "A server PID is required", "A user id (UID) is required"];
    let busy = first.starts_with("Server ") && first.ends_with("<busy>");
    (busy || known.iter().any(|words| first.starts_with(words))).then(|| Refusal::Other(first.to_owned()))
}

/// One process number a line.
pub(super) fn pids(text: &str) -> Option<Vec<Pid>> {
    text.lines().map(pid).collect()
}

fn pid(text: &str) -> Option<Pid> {
    text.trim_end().parse::<u32>().ok().and_then(|pid| Pid::try_from(pid).ok())
}

/// `33.3`
pub(super) fn percentage(text: &str) -> Option<ShownPercentage> {
    let (whole, tenth) = text.trim_end().split_once('.')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(tenth) || tenth.len() != 1 {
        return None;
    }
    let tenths = whole.parse::<u32>().ok()?.checked_mul(10)?.checked_add(tenth.parse().ok()?)?;
    (tenths <= 1000).then_some(ShownPercentage { tenths })
}

/// `2G`, `512M`.
pub(super) fn memory(text: &str) -> Option<ShownMemory> {
    text.trim_end().parse().ok().map(ShownMemory)
}

/// `0` or `1`.
pub(super) fn priority(text: &str) -> Option<Priority> {
    match text.trim_end() {
        "0" => Some(Priority::Normal),
        "1" => Some(Priority::BelowNormal),
        _ => None,
    }
}

/// `ACTIVE`
pub(super) fn status(text: &str) -> Option<ServerStatus> {
    match text.trim_end() {
        "INITIALIZING" => Some(ServerStatus::Initializing),
        "ACTIVE" => Some(ServerStatus::Active),
        "FAULT" => Some(ServerStatus::Fault),
        _ => None,
    }
}

/// The number that `terminate_client` ends with: 0, or CUDA's for the error.
pub(super) fn code(text: &str) -> Option<u32> {
    text.lines().last()?.trim_end().parse().ok()
}

/// A heading, then a client a line. Nothing at all is no clients.
pub(super) fn clients(text: &str) -> Option<Vec<Client>> {
    let mut lines = text.lines();
    let Some(heading) = lines.next() else { return Some(Vec::new()) };
    // drivers add columns: they are found by name, and the command takes what the others leave
    let names: Vec<&str> = heading.split_ascii_whitespace().collect();
    let command = names.iter().position(|name| *name == "COMMAND")?;
    lines.filter(|line| !line.trim().is_empty()).map(|line| client(line, &names, command)).collect()
}

fn client(line: &str, names: &[&str], command: usize) -> Option<Client> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let behind = names.len() - command - 1;
    let command_ends = fields.len().checked_sub(behind).filter(|end| *end >= command)?;
    let field = |name: &str| {
        let position = names.iter().position(|known| *known == name)?;
        fields.get(if position < command { position } else { position + fields.len() - names.len() }).copied()
    };
    Some(Client {
        pid: pid(field("PID")?)?,
        id: field("ID")?.parse().ok()?,
        server: pid(field("SERVER")?)?,
        device: field("DEVICE")?.to_owned(),
        namespace: field("NAMESPACE")?.parse().ok()?,
        command: fields[command..command_ends].join(" "),
    })
}

/// `[0] 00:00.0, NVIDIA H200`, and below it `485.1` for each client.
pub(super) fn device_clients(text: &str) -> Option<Vec<DeviceClients>> {
    let mut devices: Vec<DeviceClients> = Vec::new();
    for line in text.lines() {
        if let Some((ordinal, name)) = line.strip_prefix('[').and_then(|line| line.split_once(']')) {
            let name = name.trim().to_owned();
            devices.push(DeviceClients { ordinal: ordinal.parse().ok()?, name, clients: Vec::new() });
        } else {
            let (number, context) = line.trim_end().split_once('.')?;
            devices.last_mut()?.clients.push((pid(number)?, context.parse().ok()?));
        }
    }
    Some(devices)
}

impl ShownPercentage {
    /// In tenths of a percent, 0 to 1000.
    pub const fn tenths(self) -> u32 {
        self.tenths
    }

    /// Whether that percentage is shown so. A half is rounded as its binary neighbour falls, so both are taken.
    pub fn shows(self, percentage: Percentage) -> bool {
        (self.tenths * 100).abs_diff(percentage.thousandths()) <= 50
    }
}

impl ShownMemory {
    /// What is shown, which is not more than what is in force.
    pub const fn memory(self) -> MemoryQuantity {
        self.0
    }

    /// Whether that amount is shown so.
    pub fn shows(self, memory: MemoryQuantity) -> bool {
        let mib = memory.mib();
        self.0.mib() == if mib >= 1024 { mib / 1024 * 1024 } else { mib }
    }
}

impl fmt::Display for ShownPercentage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.tenths / 10, self.tenths % 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::command::MemoryLimit;
    use proptest::prelude::*;
    use rstest::rstest;

    fn number(pid: u32) -> Pid {
        Pid::try_from(pid).unwrap()
    }

    // H200, driver 580.159, two clients in the background
    const PS: &str = "\
PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        
485       1         488            GPU-2f4d28e8-e764-cfd3    4026531836     python3        
497       2         488            GPU-2f4d28e8-e764-cfd3    4026531836     /opt/my app/python3        
";
    const DEVICE_CLIENTS: &str = "[0] 00:00.0, NVIDIA H200\n485.1\n497.1\n[1] 00:01.0, NVIDIA H200\n";

    #[test]
    fn clients_are_read_by_the_names_of_the_columns() {
        let read = clients(PS).unwrap();
        assert_eq!(read.len(), 2);
        assert_eq!((read[0].pid, read[0].id, read[0].server), (number(485), 1, number(488)));
        assert_eq!((read[0].device.as_str(), read[0].namespace), ("GPU-2f4d28e8-e764-cfd3", 4_026_531_836));
        assert_eq!((read[0].command.as_str(), read[1].command.as_str()), ("python3", "/opt/my app/python3"));
        let more = "PID ID SERVER DEVICE NAMESPACE COMMAND ATTRIBUTES\n1 2 3 GPU-4 5 six six SEVEN\n";
        let read = clients(more).unwrap();
        assert_eq!((read[0].namespace, read[0].command.as_str()), (5, "six six"));
        assert_eq!(clients(""), Some(Vec::new()));
        assert_eq!(clients("PID ID\n1 2\n"), None);
        assert_eq!(clients("PID ID SERVER DEVICE NAMESPACE COMMAND\n1 2 3\n"), None);
    }

    #[test]
    fn clients_of_each_gpu_are_read() {
        let read = device_clients(DEVICE_CLIENTS).unwrap();
        assert_eq!(read[0].clients, [(number(485), 1), (number(497), 1)]);
        assert_eq!((read[1].ordinal, read[1].name.as_str()), (1, "00:01.0, NVIDIA H200"));
        assert_eq!(device_clients(""), Some(Vec::new()));
        assert_eq!(device_clients("485.1\n"), None);
    }

    #[rstest]
    #[case("Unknown command \"get_server_status\"\n", Refusal::UnknownCommand)]
    #[case("Server 42 not found\n", Refusal::NoServer(Some(42)))]
    #[case("Server not found\n", Refusal::NoServer(None))]
    #[case("Server 1 not found\nServer 1 not found!\n1\n", Refusal::NoServer(Some(1)))]
    #[case("A server PID is required\n", Refusal::Other("A server PID is required".to_owned()))]
    #[case(
        "Invalid priority value - must be 0 or 1!\n",
        Refusal::Other("Invalid priority value - must be 0 or 1!".to_owned())
    )]
    #[case(
        "Not enough privilege to execute quit command\n",
        Refusal::Privileges("Not enough privilege to execute quit command".to_owned())
    )]
    fn refusals_are_known(#[case] text: &str, #[case] known: Refusal) {
        assert_eq!(refusal(text), Some(known));
    }

    #[rstest]
    #[case("")]
    #[case("100.0\n")]
    #[case(PS)]
    #[case(DEVICE_CLIENTS)]
    fn answers_are_no_refusals(#[case] text: &str) {
        assert_eq!(refusal(text), None);
    }

    #[rstest]
    #[case("100.0\n", Some(1000))]
    #[case("33.3", Some(333))]
    #[case("0.0", Some(0))]
    #[case("", None)]
    #[case("33", None)]
    #[case("33.33", None)]
    #[case("+3.3", None)]
    #[case("100.1", None)]
    #[case("nan", None)]
    fn percentages_are_read(#[case] text: &str, #[case] tenths: Option<u32>) {
        assert_eq!(percentage(text).map(ShownPercentage::tenths), tenths);
    }

    // what drivers 535 and 550 made of them
    #[rstest]
    #[case("33.333", "33.3")]
    #[case("0.05", "0.1")]
    #[case("0.001", "0.0")]
    #[case("12.55", "12.6")]
    #[case("33.35", "33.4")]
    fn a_rounded_percentage_is_recognised(#[case] given: &str, #[case] shown: &str) {
        assert!(percentage(shown).unwrap().shows(given.parse().unwrap()));
        assert!(!percentage("50.0").unwrap().shows(given.parse().unwrap()));
    }

    #[rstest]
    #[case("2G\n", "2048M", true)]
    #[case("1G\n", "2047M", true)]
    #[case("1G\n", "2048M", false)]
    #[case("512M\n", "512M", true)]
    #[case("512M\n", "513M", false)]
    fn a_rounded_limit_is_recognised(#[case] shown: &str, #[case] given: &str, #[case] matches: bool) {
        assert_eq!(memory(shown).unwrap().shows(given.parse().unwrap()), matches);
    }

    #[rstest]
    #[case("")]
    #[case("banana\n")]
    #[case("0G\n")]
    fn no_limit_is_not_read_as_one(#[case] text: &str) {
        assert_eq!(memory(text), None);
    }

    #[test]
    fn an_answer_cut_short_is_noticed() {
        assert_eq!(before_last("").map(|(before, _)| before), None);
        assert_eq!(before_last("485\n").map(|(before, _)| before), None);
        assert_eq!(before_last("485\n497\n100").map(|(before, _)| before), None);
        assert_eq!(before_last("485\n497\n100.0\n").map(|(before, _)| before), Some("485\n497"));
        assert_eq!(before_last("100.0\n").map(|(before, _)| before), Some(""));
    }

    #[test]
    fn states_priorities_and_codes_are_read() {
        assert_eq!(status("ACTIVE\n"), Some(ServerStatus::Active));
        assert_eq!(status("\n"), None);
        assert_eq!(priority("1\n"), Some(Priority::BelowNormal));
        assert_eq!(priority("2\n"), None);
        assert_eq!(code("Server 1 not found\nServer 1 not found!\n1\n"), Some(1));
        assert_eq!(code("0\n"), Some(0));
        assert_eq!(code(""), None);
    }

    proptest! {
        #[test]
        fn no_answer_makes_it_panic(text in "[ -~\n]{0,200}", name in "\\PC{0,40}") {
            let _ = (refusal(&text), pids(&text), percentage(&text), memory(&text), priority(&text));
            let _ = (status(&text), code(&text), before_last(&text), device_clients(&text), clients(&text));
            let _ = clients(&format!("PID ID SERVER DEVICE NAMESPACE COMMAND MORE\n{text}"));
            let named = clients(&format!("{PS}9 1 8 GPU-1 7 {name}"));
            prop_assert!(named.is_none_or(|clients| clients.len() == 2 || clients[2].pid == number(9)));
        }

        #[test]
        fn every_limit_is_recognised_as_it_is_shown(mib in 1u64..1 << 43) {
            let limit = MemoryLimit::new(MemoryQuantity::from_mib(mib)).unwrap().memory();
            let shown = if mib >= 1024 { format!("{}G", mib / 1024) } else { format!("{mib}M") };
            prop_assert!(memory(&shown).unwrap().shows(limit));
        }
    }
}
