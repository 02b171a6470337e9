//! Dates for templates: the common part of Python's `strftime`, in UTC and English.

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// Formats a time; an unknown directive is an error that names it.
pub(super) fn format_time(unix_seconds: u64, format: &str) -> Result<String, String> {
    let days = unix_seconds / 86_400;
    let (year, month, day) = date(days);
    let (hour, minute, second) = (unix_seconds / 3600 % 24, unix_seconds / 60 % 60, unix_seconds % 60);
    // 1 January 1970 was a Thursday.
    let weekday = DAYS[((days + 3) % 7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let half_day_hour = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = rest.next();
        let unpadded = directive == Some('-');
        if unpadded {
            directive = rest.next();
        }
        let two = |value: u64| if unpadded { value.to_string() } else { format!("{value:02}") };
        out.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('H') => two(hour),
            Some('I') => two(half_day_hour),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('%') => "%".to_owned(),
            other => return Err(format!("unknown date directive %{}", other.map(String::from).unwrap_or_default())),
        });
    }
    Ok(out)
}

/// Year, month and day of a day counted from 1 January 1970.
fn date(mut days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // 400 years always have 146,097 days.
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month as u64 + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_known_dates() {
        assert_eq!(format_time(0, "%d %b %Y %H:%M:%S %A").unwrap(), "01 Jan 1970 00:00:00 Thursday");
        assert_eq!(format_time(951_782_400, "%F %-d %B, %a").unwrap(), "2000-02-29 29 February, Tue");
        assert_eq!(format_time(1_735_689_599, "%F %T %I %p 100%%").unwrap(), "2024-12-31 23:59:59 11 PM 100%");
    }

    #[test]
    fn names_an_unknown_directive() {
        assert_eq!(format_time(0, "%Q").unwrap_err(), "unknown date directive %Q");
        assert!(format_time(0, "%").is_err());
    }
}
