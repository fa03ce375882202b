//! Where an error is told: once, to whoever is listening. Engines listen to different things.

use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use tracing_subscriber::layer::SubscriberExt;

use crate::kernel;
use crate::layout::Layout;

/// The `--log` file of an OCI runtime. An engine shows its users what stands there, and little else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Log {
    /// The file; none where the runtime's standard error is the log.
    pub path: Option<PathBuf>,
    /// How its lines are written.
    pub format: Format,
}

/// `--log-format`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// `time="…" level=error msg="…"`
    #[default]
    Text,
    /// `{"level":"error","msg":"…","time":"…"}`
    Json,
}

/// Tells an error to standard error.
pub fn to_stderr(error: &dyn std::error::Error) {
    // nobody is left to be told that standard error is closed
    let _ = writeln!(io::stderr(), "oci-mps: {error}");
}

/// Tells an error as runc would: to standard error and, where there is one, to the log.
pub fn to_log(log: &Log, error: &dyn std::error::Error) {
    to_stderr(error);
    let Some(path) = &log.path else { return };
    if kernel::same_file(path, Path::new("/proc/self/fd/2")) {
        return;
    }
    let line = line(log.format, &format!("oci-mps: {error}"), SystemTime::now());
    let _ = append(path, &line);
}

/// Tells an error of a hook, whose standard error an engine may throw away: to standard error and to journald, or to
/// a file where there is no journald.
pub fn to_journal(layout: &Layout, error: &dyn std::error::Error) {
    to_stderr(error);
    if journal(error).is_err() {
        let line = line(Format::Text, &format!("oci-mps: {error}"), SystemTime::now());
        let _ = DirBuilder::new().recursive(true).mode(0o755).create(layout.logs());
        let _ = append(&layout.logs().join("hook.log"), &line);
    }
}

fn journal(error: &dyn std::error::Error) -> io::Result<()> {
    let journald = tracing_journald::layer()?.with_syslog_identifier("oci-mps".to_owned());
    let subscriber = tracing_subscriber::registry().with(journald);
    tracing::subscriber::with_default(subscriber, || tracing::error!("{error}"));
    Ok(())
}

/// In one write, so that lines of several processes do not mix.
fn append(path: &Path, line: &str) -> io::Result<()> {
    // never through a link that somebody put in the log's place
    let mut options = File::options();
    options.append(true).create(true).mode(0o644).custom_flags(nix::libc::O_NOFOLLOW);
    options.open(path)?.write_all(line.as_bytes())
}

/// One line as logrus writes it, which is what engines parse.
fn line(format: Format, message: &str, now: SystemTime) -> String {
    let time = rfc3339(now);
    match format {
        Format::Json => {
            let line = serde_json::json!({ "level": "error", "msg": message, "time": time });
            format!("{line}\n")
        }
        Format::Text => format!("time=\"{time}\" level=error msg={}\n", quoted(message)),
    }
}

/// As Go quotes a text (`%q`), so that a line stays one line.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            control if u32::from(control) < 0x20 || u32::from(control) == 0x7f => {
                quoted.push_str("\\x");
                quoted.extend([u32::from(control) / 16, u32::from(control) % 16].map(hex_digit));
            }
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

fn hex_digit(value: u32) -> char {
    char::from_digit(value, 16).unwrap_or('?')
}

/// The time in UTC, to the second: `2026-01-31T23:59:59Z`. What is before 1970 is 1970.
pub fn rfc3339(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (year, month, day) = date(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Year, month and day of a day counted from 1970-01-01 (Howard Hinnant, "chrono-compatible low-level date
/// algorithms", `civil_from_days`).
fn date(days: u64) -> (u64, u64, u64) {
    /// From 0000-03-01, where a leap day ends its year, to 1970-01-01.
    const TO_EPOCH: u64 = 719_468;
    /// 400 years.
    const ERA: u64 = 146_097;
    let days = days + TO_EPOCH;
    let (era, day_of_era) = (days / ERA, days % ERA);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / (ERA - 1)) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::time::Duration;

    // `date -u -d @N +%FT%TZ`
    #[rstest]
    #[case(0, "1970-01-01T00:00:00Z")]
    #[case(951_782_400, "2000-02-29T00:00:00Z")]
    #[case(951_868_799, "2000-02-29T23:59:59Z")]
    #[case(1_709_164_800, "2024-02-29T00:00:00Z")]
    #[case(1_735_689_599, "2024-12-31T23:59:59Z")]
    #[case(4_107_542_400, "2100-03-01T00:00:00Z")]
    fn times_are_what_date_says(#[case] seconds: u64, #[case] expected: &str) {
        assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
    }

    #[test]
    fn lines_are_those_of_logrus() {
        let message = "oci-mps: \"8Gigs\" is not\nan amount\u{1}";
        assert_eq!(
            line(Format::Json, message, UNIX_EPOCH),
            "{\"level\":\"error\",\"msg\":\"oci-mps: \\\"8Gigs\\\" is not\\nan amount\\u0001\",\
             \"time\":\"1970-01-01T00:00:00Z\"}\n"
        );
        assert_eq!(
            line(Format::Text, message, UNIX_EPOCH),
            "time=\"1970-01-01T00:00:00Z\" level=error msg=\"oci-mps: \\\"8Gigs\\\" is not\\nan amount\\x01\"\n"
        );
    }

    #[test]
    fn an_error_is_added_to_the_log_and_a_log_that_cannot_be_written_is_no_second_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log.json");
        std::fs::write(&path, "{}\n").unwrap();
        let log = Log { path: Some(path.clone()), format: Format::Json };
        to_log(&log, &io::Error::other("no"));
        let written = std::fs::read_to_string(&path).unwrap();
        assert!(written.starts_with("{}\n{\"level\":\"error\",\"msg\":\"oci-mps: no\""), "{written}");
        to_log(&Log { path: Some(directory.path().join("no/such/log")), ..log }, &io::Error::other("no"));
    }
}
