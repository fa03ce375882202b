//! The control program, run for one exchange: nothing of our environment, no shell, and an end at the deadline.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Larger than the longest list of clients.
const LARGEST_OUTPUT: usize = 1 << 20;

/// What a program left behind.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) status: ExitStatus,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

/// Why there is no output.
#[derive(Debug)]
pub(super) enum RunError {
    /// It could not be run.
    Spawn(io::Error),
    /// It did not end in time, and was ended.
    TimedOut,
    /// Its output could not be read.
    Read(io::Error),
}

/// A child that never outlives its owner, however that ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // both fail only where it was already reaped
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a program on `input` until it ended, but not beyond `deadline`.
///
/// `input` is at most a page, so that the pipe takes it whole and writing cannot block.
pub(super) fn run(program: &mut Command, input: &[u8], deadline: Instant) -> Result<Output, RunError> {
    debug_assert!(input.len() <= 4096);
    let stdin = if input.is_empty() { Stdio::null() } else { Stdio::piped() };
    program.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = Running(program.spawn().map_err(RunError::Spawn)?);
    if let Some(mut stdin) = running.0.stdin.take() {
        // one that ended already says why in its output
        let _ = stdin.write_all(input);
    }
    let mut stdout = Stream::new(running.0.stdout.take());
    let mut stderr = Stream::new(running.0.stderr.take());
    while stdout.pipe.is_some() || stderr.pipe.is_some() {
        let (out, err) = wait_readable(stdout.fd(), stderr.fd(), deadline)?;
        stdout.read_if(out)?;
        stderr.read_if(err)?;
    }
    let status = reap(&mut running.0, deadline)?;
    Ok(Output { status, stdout: stdout.text(), stderr: stderr.text() })
}

/// One end of a pipe, until it was read to its end.
struct Stream<R> {
    pipe: Option<R>,
    bytes: Vec<u8>,
}

impl<R: Read + AsFd> Stream<R> {
    fn new(pipe: Option<R>) -> Self {
        Self { pipe, bytes: Vec::new() }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    fn read_if(&mut self, readable: bool) -> Result<(), RunError> {
        let Some(pipe) = self.pipe.as_mut().filter(|_| readable) else { return Ok(()) };
        let mut part = [0; 4096];
        match pipe.read(&mut part).map_err(RunError::Read)? {
            0 => self.pipe = None,
            length => self.bytes.extend_from_slice(&part[..length]),
        }
        if self.bytes.len() > LARGEST_OUTPUT {
            return Err(RunError::Read(io::ErrorKind::FileTooLarge.into()));
        }
        Ok(())
    }

    fn text(self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// Sleeps until one of them has something to read or has ended, and says which.
fn wait_readable(
    one: Option<BorrowedFd<'_>>,
    other: Option<BorrowedFd<'_>>,
    deadline: Instant,
) -> Result<(bool, bool), RunError> {
    let mut waiting: Vec<PollFd<'_>> =
        [one, other].into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(RunError::TimedOut);
        }
        // rounded up: a poll of 0 ms would spin through the last millisecond
        let left = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        match poll(&mut waiting, left) {
            Err(Errno::EINTR) | Ok(0) => {}
            Err(error) => return Err(RunError::Read(error.into())),
            Ok(_) => break,
        }
    }
    let mut ready = waiting.iter().map(|polled| polled.any().unwrap_or(true));
    let mut next = |asked: bool| asked && ready.next().unwrap_or(false);
    Ok((next(one.is_some()), next(other.is_some())))
}

/// Waits for a child whose output has ended, which is about to end itself.
fn reap(child: &mut Child, deadline: Instant) -> Result<ExitStatus, RunError> {
    const LONGEST_PAUSE: Duration = Duration::from_millis(5);
    let mut pause = Duration::from_micros(50);
    loop {
        match child.try_wait().map_err(RunError::Read)? {
            Some(status) => return Ok(status),
            None if Instant::now() >= deadline => return Err(RunError::TimedOut),
            None => thread::sleep(pause),
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, input: &[u8], patience: Duration) -> Result<Output, RunError> {
        run(Command::new("/bin/sh").args(["-c", script]), input, Instant::now() + patience)
    }

    #[test]
    fn output_and_status_are_kept_apart() {
        let output = shell("cat; echo no >&2; exit 3", b"yes\n", Duration::from_secs(5)).unwrap();
        assert_eq!((output.stdout.as_str(), output.stderr.as_str()), ("yes\n", "no\n"));
        assert_eq!(output.status.code(), Some(3));
    }

    #[test]
    fn what_hangs_is_ended_at_the_deadline_and_reaped() {
        for script in ["exec sleep 60", "exec sleep 60 >&- 2>&-"] {
            let begun = Instant::now();
            let error = shell(script, b"", Duration::from_millis(50)).unwrap_err();
            assert!(matches!(error, RunError::TimedOut));
            assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        }
    }

    #[test]
    fn what_never_stops_talking_is_ended() {
        let error = shell("exec cat /dev/zero", b"", Duration::from_secs(10)).unwrap_err();
        assert!(matches!(error, RunError::Read(error) if error.kind() == io::ErrorKind::FileTooLarge));
    }

    #[test]
    fn one_that_does_not_listen_is_no_failure() {
        let output = shell("exit 0", b"unheard\n", Duration::from_secs(5)).unwrap();
        assert!(output.status.success());
    }
}
