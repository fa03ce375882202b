//! Amounts with their units: device memory in MiB and percentages, parsed exactly or refused.
//!
//! MPS reads a limit it does not understand as *no limit at all* (`banana`, `1.5G`, `2097152K`, measured with
//! driver 580.159), so nothing is rounded, guessed or ignored here: what is not in the grammar is an error that
//! names what to write instead.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An amount of device memory, in whole MiB.
///
/// The range is `0..=MemoryQuantity::MAX`; a quantity that was *asked for* is at least 1 MiB ([`FromStr`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MemoryQuantity(u64);

/// A share of a whole, in (0, 100] percent, exact to a thousandth of a percent.
///
/// The thread percentage of MPS reads back with one decimal (`33.333` as `33.3`) and takes as many as one gives;
/// three are kept, more are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Percentage(u32);

/// Why a text is not an amount. The text itself is named by whoever knows which key it came from.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Nothing between the separators.
    #[error("is empty; write for example {example}")]
    Empty {
        /// A value that would be accepted.
        example: &'static str,
    },
    /// Not a number followed by a unit that is known.
    #[error("{given:?} is not an amount of memory; write whole MiB or GiB, for example 8GiB or 8192MiB")]
    NotMemory {
        /// The text as it was given.
        given: String,
    },
    /// Nearly right: the way it must be written is known.
    #[error("{given:?} is not an amount of memory; write {instead}")]
    WriteInstead {
        /// The text as it was given.
        given: String,
        /// The same amount in the grammar, or what is nearest to it.
        instead: String,
    },
    /// Zero, where MPS would read "no limit".
    #[error("{given:?} asks for nothing, which MPS would take for no limit; ask for at least 1MiB")]
    Zero {
        /// The text as it was given.
        given: String,
    },
    /// More than can be written in MiB.
    #[error("{given:?} is more memory than can be counted")]
    TooLarge {
        /// The text as it was given.
        given: String,
    },
    /// Not a percentage in (0, 100] with at most three decimals.
    #[error(
        "{given:?} is not a percentage; write a number above 0 and up to 100 with at most three decimals, \
         for example 25 or 12.5"
    )]
    NotPercentage {
        /// The text as it was given.
        given: String,
    },
}

impl MemoryQuantity {
    /// Nothing.
    pub const ZERO: Self = Self(0);
    /// The most that is counted: 2^53 MiB, so that every JSON reader holds it exactly.
    pub const MAX: Self = Self(1 << 53);

    /// So many MiB; anything above [`Self::MAX`] is [`Self::MAX`].
    pub const fn from_mib(mib: u64) -> Self {
        if mib > Self::MAX.0 { Self::MAX } else { Self(mib) }
    }

    /// Whole MiB that fit into so many bytes.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes >> 20)
    }

    /// In MiB.
    pub const fn mib(self) -> u64 {
        self.0
    }

    /// The sum, never above [`Self::MAX`].
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self::from_mib(self.0.saturating_add(other.0))
    }

    /// What is left after taking `other` away, never below nothing.
    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// An equal part for each of `parts`, rounded down: the parts never add up to more than the whole.
    #[must_use]
    pub fn split(self, parts: NonZeroU32) -> Self {
        Self(self.0 / u64::from(parts.get()))
    }

    /// `count` times as much, never above [`Self::MAX`].
    #[must_use]
    pub fn times(self, count: u32) -> Self {
        Self::from_mib(self.0.saturating_mul(u64::from(count)))
    }

    /// That part of it, rounded down.
    #[must_use]
    pub fn part(self, percentage: Percentage) -> Self {
        let part = u128::from(self.0) * u128::from(percentage.0) / u128::from(Percentage::WHOLE.0);
        Self(u64::try_from(part).unwrap_or(u64::MAX))
    }

    /// As `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` takes it without misreading: an integer and `M`.
    pub fn as_mps_limit(self) -> String {
        format!("{}M", self.0)
    }
}

impl fmt::Display for MemoryQuantity {
    /// `12,288 MiB`: with its unit, thousands apart.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        let mut spaced = String::with_capacity(digits.len() + digits.len() / 3);
        for (position, digit) in digits.chars().enumerate() {
            if position > 0 && (digits.len() - position).is_multiple_of(3) {
                spaced.push(',');
            }
            spaced.push(digit);
        }
        f.pad(&format!("{spaced} MiB"))
    }
}

impl FromStr for MemoryQuantity {
    type Err = QuantityError;

    /// `8GiB`, `8192MiB`, `8G` and `8192M` (binary, as MPS reads them). Nothing else: no blanks, signs,
    /// decimals, bytes, KiB or decimal units.
    fn from_str(given: &str) -> Result<Self, QuantityError> {
        if given.is_empty() {
            return Err(QuantityError::Empty { example: "8GiB" });
        }
        let unit_at = given.find(|c: char| !c.is_ascii_digit()).unwrap_or(given.len());
        let (digits, unit) = given.split_at(unit_at);
        let mib_each = match unit {
            "MiB" | "M" => 1,
            "GiB" | "G" => 1024,
            _ => return Err(unknown_unit(given)),
        };
        if digits.is_empty() {
            return Err(QuantityError::NotMemory { given: given.to_owned() });
        }
        let too_large = || QuantityError::TooLarge { given: given.to_owned() };
        let number: u64 = digits.parse().map_err(|_| too_large())?;
        let mib = number.checked_mul(mib_each).filter(|mib| *mib <= Self::MAX.0).ok_or_else(too_large)?;
        if mib == 0 {
            return Err(QuantityError::Zero { given: given.to_owned() });
        }
        Ok(Self(mib))
    }
}

/// Says how the amount that was probably meant is written.
fn unknown_unit(given: &str) -> QuantityError {
    let number_end = given.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(given.len());
    let (number, unit) = given.split_at(number_end);
    let unit = unit.trim_start();
    let mib_each = match unit.to_ascii_lowercase().as_str() {
        "m" | "mb" | "mib" | "mi" => 1.0,
        "g" | "gb" | "gib" | "gi" => 1024.0,
        "t" | "tb" | "tib" | "ti" => 1024.0 * 1024.0,
        "" if number.bytes().all(|b| b.is_ascii_digit()) && !number.is_empty() => {
            return QuantityError::WriteInstead {
                given: given.to_owned(),
                instead: format!("{number}MiB or {number}GiB: an amount needs its unit"),
            };
        }
        _ => return QuantityError::NotMemory { given: given.to_owned() },
    };
    match number.parse::<f64>() {
        Ok(number) if number > 0.0 && (number * mib_each).fract() == 0.0 && number * mib_each < 1e15 => {
            let mib = number * mib_each;
            let instead =
                if mib % 1024.0 == 0.0 { format!("{}GiB", mib / 1024.0) } else { format!("{mib}MiB") };
            QuantityError::WriteInstead { given: given.to_owned(), instead }
        }
        _ => QuantityError::NotMemory { given: given.to_owned() },
    }
}

impl Percentage {
    /// All of it.
    pub const WHOLE: Self = Self(100_000);

    /// In thousandths of a percent, 1 to 100,000.
    pub const fn thousandths(self) -> u32 {
        self.0
    }

    /// `part` of `whole`, rounded down to a thousandth of a percent; `None` where that is nothing or above 100.
    pub fn of_parts(part: u32, whole: NonZeroU32) -> Option<Self> {
        let thousandths = u64::from(part) * u64::from(Self::WHOLE.0) / u64::from(whole.get());
        u32::try_from(thousandths).ok().and_then(|t| Self::try_from(t).ok())
    }
}

impl TryFrom<u32> for Percentage {
    type Error = QuantityError;

    /// From thousandths of a percent.
    fn try_from(thousandths: u32) -> Result<Self, QuantityError> {
        if (1..=Self::WHOLE.0).contains(&thousandths) {
            Ok(Self(thousandths))
        } else {
            Err(QuantityError::NotPercentage { given: format!("{thousandths} thousandths") })
        }
    }
}

impl From<Percentage> for u32 {
    fn from(percentage: Percentage) -> Self {
        percentage.0
    }
}

impl fmt::Display for Percentage {
    /// `25`, `12.5`: without a sign and without trailing zeros, as `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, fraction) = (self.0 / 1000, self.0 % 1000);
        if fraction == 0 {
            return f.pad(&whole.to_string());
        }
        f.pad(format!("{whole}.{fraction:03}").trim_end_matches('0'))
    }
}

impl FromStr for Percentage {
    type Err = QuantityError;

    /// `25`, `25%`, `12.5`.
    fn from_str(given: &str) -> Result<Self, QuantityError> {
        if given.is_empty() {
            return Err(QuantityError::Empty { example: "25" });
        }
        let number = given.strip_suffix('%').unwrap_or(given);
        parse_thousandths(number)
            .and_then(|thousandths| Self::try_from(thousandths).ok())
            .ok_or_else(|| QuantityError::NotPercentage { given: given.to_owned() })
    }
}

/// A plain decimal number in thousandths, or nothing where it is none or needs rounding.
fn parse_thousandths(number: &str) -> Option<u32> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let all_digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !all_digits(whole) || !all_digits(fraction) || fraction.len() > 3 {
        return None;
    }
    let thousandths: u32 = format!("{fraction:0<3}").parse().ok()?;
    whole.parse::<u32>().ok()?.checked_mul(1000)?.checked_add(thousandths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    #[rstest]
    #[case("8GiB", 8192)]
    #[case("8G", 8192)]
    #[case("8192MiB", 8192)]
    #[case("512M", 512)]
    fn memory_in_the_grammar_is_read_exactly(#[case] given: &str, #[case] mib: u64) {
        assert_eq!(given.parse(), Ok(MemoryQuantity::from_mib(mib)));
    }

    #[rstest]
    #[case("", "is empty")]
    #[case("0G", "no limit")]
    #[case("1.5G", "write 1536MiB")]
    #[case("2.5GiB", "write 2560MiB")]
    #[case("8gb", "write 8GiB")]
    #[case("8Gi", "write 8GiB")]
    #[case("1T", "write 1024GiB")]
    #[case("8192", "8192MiB or 8192GiB")]
    #[case(" 8G", "for example 8GiB")]
    #[case("8 GiB", "write 8GiB")]
    #[case("-1", "for example 8GiB")]
    #[case("banana", "for example 8GiB")]
    #[case("2097152K", "for example 8GiB")]
    #[case("99999999999999999999G", "more memory than can be counted")]
    #[case("9007199254740993M", "more memory than can be counted")]
    #[case("GiB", "for example 8GiB")]
    #[case("8GiB8", "for example 8GiB")]
    #[case("٨GiB", "for example 8GiB")]
    fn memory_outside_the_grammar_is_refused_with_what_to_write(#[case] given: &str, #[case] says: &str) {
        let error = given.parse::<MemoryQuantity>().unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }

    #[rstest]
    #[case("25", 25_000)]
    #[case("25%", 25_000)]
    #[case("12.5", 12_500)]
    #[case("33.333", 33_333)]
    #[case("0.001", 1)]
    #[case("100", 100_000)]
    fn percentages_are_read_exactly(#[case] given: &str, #[case] thousandths: u32) {
        assert_eq!(given.parse::<Percentage>().unwrap().thousandths(), thousandths);
    }

    #[rstest]
    #[case("0")]
    #[case("0.0")]
    #[case("101")]
    #[case("100.001")]
    #[case("33.3333")]
    #[case("nan")]
    #[case("-5")]
    #[case("+5")]
    #[case("1e1")]
    #[case("25%%")]
    #[case(".5")]
    #[case("5.")]
    #[case("25 ")]
    #[case("99999999999")]
    fn other_percentages_are_refused(#[case] given: &str) {
        assert!(matches!(given.parse::<Percentage>(), Err(QuantityError::NotPercentage { .. })));
    }

    #[test]
    fn amounts_are_shown_with_unit_and_thousands() {
        assert_eq!(MemoryQuantity::from_mib(12_288).to_string(), "12,288 MiB");
        assert_eq!(MemoryQuantity::from_mib(512).to_string(), "512 MiB");
        assert_eq!(MemoryQuantity::from_mib(1_048_576).to_string(), "1,048,576 MiB");
        assert_eq!("12.50".parse::<Percentage>().unwrap().to_string(), "12.5");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_and_what_is_read_survives_printing(text in ".{0,24}") {
            if let Ok(memory) = text.parse::<MemoryQuantity>() {
                prop_assert_eq!(memory.as_mps_limit().parse(), Ok(memory));
            }
            if let Ok(percentage) = text.parse::<Percentage>() {
                prop_assert_eq!(percentage.to_string().parse(), Ok(percentage));
            }
        }

        #[test]
        fn parts_never_add_up_to_more_than_the_whole(mib in 0u64..1 << 53, parts in 1u32..2000) {
            let whole = MemoryQuantity::from_mib(mib);
            let parts = NonZeroU32::new(parts).unwrap();
            prop_assert!(whole.split(parts).times(parts.get()) <= whole);
            let percentage = Percentage::of_parts(1, parts).unwrap();
            prop_assert!(whole.part(percentage).times(parts.get()) <= whole);
        }
    }
}
