"""The active party: it has the label, grows the trees and knows the sums."""
