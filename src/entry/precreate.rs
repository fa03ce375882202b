//! `oci-mps hook precreate`: podman hands over the whole `config.json` and runs the container by what comes back.
//!
//! It is started with an empty environment, anywhere, its standard error lost, and an empty answer is an error; so
//! where nothing applies the answer is the question, byte for byte.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::programs::{self, ProgramError};
use super::report;
use crate::file;
use crate::inject::{self, Outcome, Refused, Setting};
use crate::kernel::{self, Process};
use crate::layout::Layout;

/// Podman writes before it waits, so whoever takes longer is not podman.
const PATIENCE: Duration = Duration::from_secs(5);

/// Far longer than podman takes from this hook to the container.
const RESERVED_FOR: Duration = Duration::from_secs(120);

#[derive(Debug, thiserror::Error)]
enum PrecreateError {
    #[error(
        "cannot read the container's config.json from standard input: {0}; engines call this hook, people do not"
    )]
    Read(#[source] io::Error),
    #[error("cannot answer with the container's config.json: {0}")]
    Write(#[source] io::Error),
    #[error("cannot tell who starts the container: {0}; mount /proc")]
    Holder(#[source] io::Error),
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error(transparent)]
    Refused(#[from] Refused),
}

/// Answers podman.
pub fn run() -> ExitCode {
    let layout = Layout::new(kernel::owner(), |name| std::env::var_os(name));
    match answer(&layout) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::to_journal(&layout, &error);
            ExitCode::FAILURE
        }
    }
}

fn answer(layout: &Layout) -> Result<(), PrecreateError> {
    let original = within(PATIENCE, || file::read_all(io::stdin())).map_err(PrecreateError::Read)?;
    answer_to(&original, layout, io::stdout())
}

/// Writes the edited document, or the original where there is nothing to edit.
fn answer_to(original: &[u8], layout: &Layout, mut out: impl Write) -> Result<(), PrecreateError> {
    if inject::concerns(original) {
        let setting = Setting {
            layout: layout.clone(),
            programs: programs::all().map_err(|error| error.to_string()),
            // podman itself, which outlives this hook and sees the container created
            holder: Process::parent().map_err(PrecreateError::Holder)?,
            // unless it is the service behind podman's API, which outlives everything
            lapses_after: Some(RESERVED_FOR),
            spec: None,
        };
        if inject::inject(original, &setting, |edited| write_whole(&mut out, edited))? == Outcome::Edited {
            return Ok(());
        }
    }
    write_whole(out, original).map_err(PrecreateError::Write)
}

/// Does what may block, but does not wait for it beyond `patience`.
fn within<T: Send + 'static>(
    patience: Duration,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(work()));
    receiver.recv_timeout(patience).unwrap_or_else(|_| {
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("nothing more came for {} s", patience.as_secs()),
        ))
    })
}

fn write_whole(mut out: impl Write, bytes: &[u8]) -> io::Result<()> {
    out.write_all(bytes)?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_concern_us_comes_back_as_it_is_even_if_it_is_no_json() {
        let layout = Layout::new(crate::layout::Owner::Root, |_| None);
        for document in [&b"{}"[..], b"", b"\xff\x00 not json", b"{ \"annotations\" : {\"a\":\"b\"} }\n"] {
            let mut answer = Vec::new();
            answer_to(document, &layout, &mut answer).unwrap();
            assert_eq!(answer, document);
        }
    }

    #[test]
    fn a_writer_that_never_ends_is_not_waited_for() {
        let (reader, writer) = io::pipe().unwrap();
        let error = within(Duration::from_millis(20), || file::read_all(reader)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(writer);
    }

    #[test]
    fn a_reader_that_went_away_is_an_error() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        assert_eq!(write_whole(Full, b"{}").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
