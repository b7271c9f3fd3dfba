"""Floor 5: what a cluster of GPU servers does with many models and too little memory."""
