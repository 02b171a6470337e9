//! Characters that no reader sees and that no writing system needs, which are used to hide text from people.
//!
//! Two kinds: *bidirectional controls*, which turn the order of text around, and *zero-width spaces* (U+200B, and U+FEFF inside
//! text). Everything that spells words or draws signs stays: zero-width joiners and non-joiners (Persian, Hindi, emoji of
//! several parts), variation selectors, tag characters (flags), soft hyphens.

use std::borrow::Cow;
use std::ops::AddAssign;

/// How many invisible characters a text holds, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Invisible {
    /// Characters that turn the order of text around.
    pub bidi_controls: u64,
    /// Spaces without width.
    pub zero_width_spaces: u64,
}

impl Invisible {
    /// Counts those of a text.
    pub fn of(text: &str) -> Self {
        // All of them take three bytes, or two for U+061C; plain ASCII has none.
        if text.is_ascii() {
            return Self::default();
        }
        let mut found = Self::default();
        for c in text.chars() {
            found.bidi_controls += u64::from(is_bidi_control(c));
            found.zero_width_spaces += u64::from(is_zero_width_space(c));
        }
        found
    }

    /// Whether there are none.
    pub fn is_none(self) -> bool {
        self == Self::default()
    }
}

impl AddAssign for Invisible {
    fn add_assign(&mut self, other: Self) {
        self.bidi_controls += other.bidi_controls;
        self.zero_width_spaces += other.zero_width_spaces;
    }
}

/// Takes bidirectional controls and zero-width spaces out of a text and says how many there were. Text that is written from right to
/// left may need the marks among them: call this only where it is asked for.
pub fn strip_invisible(text: &str) -> (Cow<'_, str>, Invisible) {
    let found = Invisible::of(text);
    if found.is_none() {
        return (Cow::Borrowed(text), found);
    }
    (Cow::Owned(text.chars().filter(|c| !is_bidi_control(*c) && !is_zero_width_space(*c)).collect()), found)
}

/// The characters with Unicode's property `Bidi_Control`.
fn is_bidi_control(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn is_zero_width_space(c: char) -> bool {
    matches!(c, '\u{200b}' | '\u{feff}')
}
